"""`train`: a run of the command, with a function of this process as its reward."""

import asyncio
import hashlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from verl_omni.api.callbacks_at_home import AT_HOME, CALLBACKS, Told
from verl_omni.api.home import Home
from verl_omni.api.reward_at_home import REWARD
from verl_omni.api.run import Run
from verl_omni.report.following import Follower
from verl_omni.report.starts import read_starts
from verl_omni.utils.errors import RunError

OnStep = Callable[[dict[str, float]], Any]
Prompts = str | Path | Sequence[str | Mapping[str, Any]]
OWN = "reward.custom_reward_function"
IN_A_FILE = {REWARD: 'reward="mine.py"', CALLBACKS: 'trainer={"callbacks": ["mine.py:Watch"]}'}

if TYPE_CHECKING:
    from verl_omni.trainer.callbacks import Callback


def train(
    model: str | Path | None = None,
    prompts: Prompts | None = None,
    reward: Callable[..., Any] | str | Path | None = None,
    *,
    recipe: str | None = None,
    val_prompts: Prompts | None = None,
    folder: str | Path = "outputs/verl-omni/default",
    on_step: OnStep | None = None,
    callbacks: Sequence["Callback"] = (),
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Run:
    """Train a model as `verl-omni train` does, and return what came of it.

    `model` is a folder or a name on the hub; `prompts` a list of texts or rows, or whatever `data.train_files` takes;
    `reward` a function (a lambda, a closure, one that is defined in a notebook), the path of a Python file with
    `compute_score`, or the name of a registered reward. A function is called in this process, one call at a time or, if
    it takes `images`, many images at once. `on_step` is called with the metrics of every step; if it returns False, or
    raises, the run is saved and ends. `callbacks` are objects of subclasses of `verl_omni.Callback`: they are called in
    this process too, and training waits for them. All other settings have the command's names:
    `settings={"trainer.save_freq": 10}`, or nested, `trainer={"save_freq": 10}`.
    """
    given = flat({**(settings or {}), **more})
    given.setdefault("trainer.default_local_dir", str(folder))
    folder = Path(given["trainer.default_local_dir"]).expanduser()
    named = {
        "actor_rollout_ref.model.path": None if model is None else str(model),
        "data.train_files": _as_files(prompts, folder, "prompts"),
        "data.val_files": _as_files(val_prompts, folder, "val_prompts"),
    }
    given |= {name: value for name, value in named.items() if value is not None}
    logger = given.get("trainer.logger")
    if on_step is not None and logger is not None and "jsonl" not in logger:
        raise ValueError(f"on_step is told what is in metrics.jsonl, and trainer.logger={logger} has no jsonl: add it")
    functions: dict[str, Callable[..., Any]] = {}
    if callable(reward):
        functions[REWARD] = at_home(reward)
        given |= _settings_of(reward)
    elif reward is not None:
        own = str(reward).endswith(".py")
        given |= {f"{OWN}.path": str(reward)} if own else {"reward.scorers": [{"name": str(reward), "weight": 1}]}
    if callbacks:
        functions[CALLBACKS] = Told(callbacks)
        others = given["trainer.callbacks"] if "trainer.callbacks" in given else _callbacks_of(recipe)
        given["trainer.callbacks"] = [*(others or ()), AT_HOME]
    for name in functions if given.get("ray.address") else ():
        raise ValueError(
            f"a {name.removesuffix('s')} of this process is not to be reached from the other machines of ray.address: "
            f"write it in a file, {IN_A_FILE[name]}"
        )
    with ExitStack() as stack:
        environment = dict(os.environ)
        if functions:
            environment |= stack.enter_context(Home(functions)).environment
        words = [*([recipe] if recipe else []), *(f"{name}={typed(value)}" for name, value in given.items())]
        _run([sys.executable, "-m", "verl_omni.trainer.main_diffusion", *words], environment, folder, on_step)
    return Run(folder)


def _callbacks_of(recipe: str | None) -> list[str]:
    """A recipe's own, which a setting of this name would take the place of."""
    if recipe is None:
        return []
    from hydra import compose, initialize_config_dir

    from verl_omni.cli.recipes import FOLDER, find_recipe
    from verl_omni.config import schema

    path = find_recipe(recipe).resolve()
    schema.register()
    search = f"hydra.searchpath=[pkg://verl_omni.trainer.config,{typed(FOLDER)}]"
    with initialize_config_dir(str(path.parent), version_base=None):
        composed = compose(path.stem, [search])
    return list(composed.trainer.callbacks)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"trainer": {"save_freq": 1}} as {"trainer.save_freq": 1}; the command says which names there are.

    A dictionary that is itself a value, such as `reward_kwargs`, is one.
    """
    from verl_omni.config.knob import walk
    from verl_omni.config.schema import DiffusionTrainerConfig

    knobs = {knob.name for knob in walk(DiffusionTrainerConfig)}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) and name not in knobs else {name: value}
    return found


def typed(value: Any) -> str:
    """As the command reads it. Its grammar takes JSON but for keys, which have no quotation marks there."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{typed(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(typed, value)) + "]"
    if isinstance(value, float):
        return float.__repr__(value)  # inf and nan are its words too
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    # Backslashes are themselves but before a quotation mark, where each needs another one.
    quoted = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), str(value))
    return f'"{quoted}"'


def at_home(reward: Callable[..., Any]) -> Callable[..., Any]:
    """The function as its caller calls it: told what it asks for by the names of its parameters."""
    from verl_omni.rewards.reward_function import RewardFunction
    from verl_omni.utils.pictures import as_pil

    known = RewardFunction(reward, _name(reward))

    def answer(**offered: Any) -> Any:
        for images, pictures in (("solution_image", "image"), ("solution_images", "images")):
            if pictures in known.wanted:
                shown = offered[images]
                offered[pictures] = [as_pil(one) for one in shown] if images.endswith("s") else as_pil(shown)
        said = reward(**{name: value for name, value in offered.items() if name in known.wanted or known.accepts_any})
        return asyncio.run(_awaited(said)) if inspect.isawaitable(said) else said

    return answer


async def _awaited(said: Any) -> Any:
    return await said


def _settings_of(reward: Callable[..., Any]) -> dict[str, Any]:
    from verl_omni.rewards.reward_function import RewardFunction

    function = "many" if RewardFunction(reward, _name(reward)).batched else "one"
    path = str(Path(__file__).with_name("reward_at_home.py"))
    return {f"{OWN}.path": path, f"{OWN}.name": function, f"{OWN}.reward_kwargs": {"code": _code(reward)}}


def _name(reward: Callable[..., Any]) -> str:
    return getattr(reward, "__qualname__", type(reward).__name__)


def _code(reward: Callable[..., Any]) -> str:
    """A digest of what it was written as."""
    code = getattr(reward, "__code__", None)
    text = _name(reward) if code is None else _parts(code)  # two lambdas may stand in one line
    try:
        text += inspect.getsource(reward if inspect.isroutine(reward) else type(reward))
    except (OSError, TypeError):
        pass  # typed at a prompt that keeps no text
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _parts(code: CodeType) -> str:
    """Names and constants, the same in every process."""
    constants = [_parts(one) if inspect.iscode(one) else one for one in code.co_consts]
    shown = [sorted(map(repr, one)) if isinstance(one, frozenset) else repr(one) for one in constants]
    return repr((code.co_names, code.co_varnames, shown))


def _as_files(prompts: Prompts | None, folder: Path, what: str) -> Any:
    """A list of texts or rows becomes a file beside the run's folder."""
    if prompts is None or isinstance(prompts, str | Path):
        return prompts if prompts is None else str(prompts)
    rows = [{"prompt": row} if isinstance(row, str) else dict(row) for row in prompts]
    path = folder.parent / f"{folder.name}.{what}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _run(command: list[str], environment: dict[str, str], folder: Path, on_step: OnStep | None) -> None:
    """To its end; what it says appears here. Ctrl-C, or a notebook's stop button, has it saved first."""
    steps = NewSteps(folder) if on_step else None
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last, failed = "", None
    while True:
        try:
            line = process.stdout.readline()
            last = line.strip() or last
            print(line, end="", flush=True)
            if steps is not None and _wants_to_stop(on_step, steps):
                process.send_signal(signal.SIGINT)
                steps = None
            if not line:
                break
        except BaseException as error:
            if failed is None or isinstance(error, KeyboardInterrupt):  # a second Ctrl-C is heard by the run as well
                process.send_signal(signal.SIGINT)
            failed, steps = failed or error, None
    code = process.wait()
    if isinstance(failed, KeyboardInterrupt):
        raise KeyboardInterrupt(last) from failed
    if failed is not None:
        raise failed
    if code and code != 128 + signal.SIGINT:
        raise RunError(last.removeprefix("error: "))


def _wants_to_stop(on_step: OnStep, steps: "NewSteps") -> bool:
    return any([on_step(metrics) is False for metrics in steps.read()])


class NewSteps:
    """The metrics of steps that the run which is about to start will make, each given once.

    A run that goes on cuts what is beyond its checkpoint out of the file, and makes those steps again.
    """

    def __init__(self, folder: Path):
        self.folder, self.file = folder, Follower(folder / "metrics.jsonl")
        self.before = (read_starts(folder), self._inode())
        self.seen: int | None = None

    def read(self) -> list[dict[str, float]]:
        if self.seen is None:
            starts, inode = read_starts(self.folder), self._inode()
            if inode is None or starts == self.before[0] or inode == self.before[1]:
                return []  # the run has not come so far
            self.seen = starts[-1]["step"] or -1  # a validation before the first step is told as step 0
        new = [entry for entry in self.file.entries() if entry["step"] > self.seen]
        self.seen = max([self.seen, *(entry["step"] for entry in new)])
        return [{"step": entry["step"], **entry["data"]} for entry in new]

    def _inode(self) -> int | None:
        try:
            return self.file.path.stat().st_ino
        except FileNotFoundError:
            return None
