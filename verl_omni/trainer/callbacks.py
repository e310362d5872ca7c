"""What is called as a run goes on: a class of the user's own may be among it (`trainer.callbacks`).

    from verl_omni import Callback

    class Watch(Callback):
        def on_step_end(self, run, step):
            print(step.number, step.metrics["critic/rewards/mean"])

Callbacks run on the driver, the one process that orders the work, between its steps: training waits for them.
"""

import importlib
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.trainer.interrupts import request_stop, stop_requested
from verl_omni.trainer.progress import Stages
from verl_omni.utils.errors import RunError
from verl_omni.utils.suggest import unknown
from verl_omni.utils.time_limit import time_limit

if TYPE_CHECKING:  # a notebook that writes a callback waits for none of them
    from omegaconf import DictConfig
    from verl.protocol import DataProto

SETTING = "trainer.callbacks"


@dataclass
class Run:
    """A run and how far it is."""

    config: "DictConfig"  # as the run's config.yaml has it
    folder: Path
    total_steps: int = 0
    step: int = 0  # training steps behind it

    def stop(self) -> None:
        """End after this step, as Ctrl-C does: it is saved, and the same command goes on from there."""
        request_stop()

    @property
    def stopping(self) -> bool:
        return stop_requested()


def no_rows() -> "DataProto":
    from verl.protocol import DataProto

    return DataProto()


@dataclass
class Step:
    """A training step that has been learned."""

    number: int  # from 1 on
    metrics: dict[str, float]  # what is added before the step's line is written goes to all trackers
    batch: "DataProto" = field(repr=False, default_factory=no_rows)  # its rows, rewards and advantages; no images
    timing: Stages = field(default_factory=Stages)
    last: bool = False
    end: Exception | None = None  # the run ends after this step, with this


class Callback:
    """Nothing, at every moment of a run: write the methods that you want."""

    def on_run_start(self, run: Run) -> None:
        """Models are loaded, a checkpoint too; `run.step` is 0, or the step that the run goes on from."""

    def on_step_end(self, run: Run, step: Step) -> None:
        """A step is learned, and validated where that was due. Numbers that are put into `step.metrics` are logged."""

    def on_validation(self, run: Run, metrics: dict[str, float]) -> None:
        """Of step `run.step`; the samples are in `run.folder`/validation/step_N."""

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        """A whole checkpoint is in `folder`."""

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """However it ended: `error` is None after the last step and after a stop."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class UsersCallbacks(Callback):
    """The user's, in their order. One that fails ends the run, in a line that names it."""

    def __init__(self, specs: list[str]):
        self.named = [(spec, _made(spec)) for spec in specs]

    def on_run_start(self, run: Run) -> None:
        self._each("on_run_start", run)

    def on_step_end(self, run: Run, step: Step) -> None:
        for spec, callback in self.named:
            _call(spec, callback, "on_step_end", run, step)
            for name, value in step.metrics.items():
                if not isinstance(value, int | float) and not hasattr(value, "item"):
                    raise RunError(f"{SETTING}: {spec} put {value!r} into step.metrics[{name!r}]: expected a number")

    def on_validation(self, run: Run, metrics: dict[str, float]) -> None:
        self._each("on_validation", run, metrics)

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        self._each("on_checkpoint", run, folder)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """All of them are told, whichever fails; the first failure is raised."""
        failures = []
        for named in self.named:
            try:
                _call(*named, "on_run_end", run, error)
            except RunError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def _each(self, event: str, *told: Any) -> None:
        for name, callback in self.named:
            _call(name, callback, event, *told)


def _call(name: str, callback: Callback, event: str, *told: Any) -> None:
    try:
        getattr(callback, event)(*told)
    except RunError:  # its own line, of one that speaks for others
        raise
    except (Exception, SystemExit) as error:
        raise RunError(f"{SETTING}: {name} failed in {event}: {type(error).__name__}: {error}") from error


def _made(spec: str) -> Callback:
    try:
        return callback_class(spec)()
    except (Exception, SystemExit) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{SETTING}: {spec} cannot be made: {type(error).__name__}: {error}") from error


def callback_class(spec: str) -> type[Callback]:
    """The class that `module.Class` or `file.py:Class` names. Errors are one line in the user's words."""
    place, dot, name = spec.rpartition(":" if ".py:" in spec else ".")
    if not dot:
        raise RunError(f"{SETTING}: {spec} names no class: write module.Class, or file.py:Class")
    module = _module(spec, place)
    found = getattr(module, name, None)
    own = [n for n, thing in vars(module).items() if inspect.isclass(thing) and issubclass(thing, Callback)]
    if found is None:
        raise RunError(f"{SETTING}: {unknown(f'class in {place}', name, [n for n in own if n != 'Callback'])}")
    if not (inspect.isclass(found) and issubclass(found, Callback)):
        raise RunError(f"{SETTING}: {spec} is no subclass of verl_omni.trainer.callbacks.Callback")
    check_methods(spec, found)
    if wanted := [p.name for p in inspect.signature(found).parameters.values() if p.default is p.empty and _given(p)]:
        raise RunError(f"{SETTING}: {spec} is made without arguments, and wants {', '.join(wanted)}")
    return found


def check_methods(name: str, found: type[Callback]) -> None:
    for event in dir(found):
        if event.startswith("on_") and event not in EVENTS:
            raise RunError(f"{SETTING}: {name} would never be called: {unknown('method', event, EVENTS)}")


def _given(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def _module(spec: str, place: str) -> Any:
    from verl.utils.import_utils import load_module

    path = Path(place).expanduser()
    if place.endswith(".py") and not path.is_file():
        raise RunError(f"{SETTING}: {spec}: there is no file {place}")
    try:
        with time_limit():
            return load_module(str(path)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        cause = error.__cause__ or error
        raise RunError(f"{SETTING}: {spec} cannot be imported: {type(cause).__name__}: {cause}") from error
