"""What a run is, as its checkpoints remember it, and what another start would change about it."""

import functools
import hashlib
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_omni.config.knob import moved_names, walk
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.data.prompt_files import local_files
from verl_omni.utils.external_lib import module_name, names_of
from verl_omni.utils.folders import visible_files
from verl_omni.utils.hub import model_folder
from verl_omni.utils.masking import masked
from verl_omni.utils.model_index import index_of

ARR = "actor_rollout_ref."
# The rollout's own, a second time; and how this start finds its checkpoint.
NOT_COMPARED = (f"{ARR}model.pipeline", f"{ARR}model.algo", f"{ARR}model.revision", "trainer.resume_*")
# Files and folders: what counts is what is in them, not where they lie.
CONTENT = (
    *(f"{ARR}model.{name}" for name in ("path", "lora_path", "config_path", "tokenizer_path")),
    f"{ARR}actor.teacher.path",
    f"{ARR}ref.path",
    f"{ARR}rewriter.path",
    *("data.train_files", "reward.custom_reward_function.path", "reward.reward_manager.module.path"),
)
# A file counts whole up to this size, a larger one with its size and pieces from all over it.
WHOLE_BYTES, PIECES, PIECE_BYTES = 2**24, 128, 2**16


def describe(config: DictConfig) -> dict[str, Any]:
    """Every knob with its value, and a digest of what files hold: plain data for JSON."""
    settings = {name: _plain(OmegaConf.select(config, name)) for name, *_ in walk(DiffusionTrainerConfig)}
    settings = masked({name: value for name, value in settings.items() if not _any(NOT_COMPARED, name)})
    content = {name: digest(_place(name, settings[name], config)) for name in CONTENT}
    content[f"{ARR}model.external_lib"] = digest(_module_files(settings[f"{ARR}model.external_lib"]))
    return json.loads(json.dumps({"settings": settings, "content": content}))


def changes(then: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """(what may change, what may not), each as knob -> old and new value."""
    knobs = {knob.name: knob for knob in walk(DiffusionTrainerConfig)}
    renamed = moved_names(DiffusionTrainerConfig)
    # Masked again: earlier versions knew fewer names of secrets.
    before = masked({renamed.get(name, name): value for name, value in then["settings"].items()})
    may, may_not = {}, {}
    for name, new in now["settings"].items():
        old = before.get(name, _plain(knobs[name].default))  # a knob that is younger than the checkpoint
        said = f"{name}: {_short(old)} -> {_short(new)}"
        if name in now["content"]:
            if now["content"][name] == then["content"].get(name):
                continue
            said = f"{name}: {_short(new)} has other content" if old == new else f"{said}, with other content"
        elif old == new:
            continue
        (may if knobs[name].may_change else may_not)[name] = said
    return may, may_not


def _place(name: str, given: Any, config: DictConfig) -> str | list[str] | None:
    """Where it lies on this machine."""
    if given is None:
        return None
    if name.startswith("data."):
        return list(map(str, local_files(given, name)))
    if name.startswith((f"{ARR}model.", f"{ARR}rewriter.")):
        revision = config.actor_rollout_ref.model.revision if name == f"{ARR}model.path" else None
        return model_folder(given, revision, weights=False, setting=name)
    return given


def digest(paths: str | list[str] | dict[str, str] | None) -> str | None:
    """Of the files at these places, folders with all they hold; None where there is nothing."""
    if paths is None:
        return None
    paths = list(paths.values()) if isinstance(paths, dict) else paths
    result = hashlib.sha256()
    for root in map(Path, [paths] if isinstance(paths, str) else paths):
        root = root.expanduser()
        for path in _files(root):
            stat = path.stat()
            result.update(f"{path.relative_to(root).as_posix()} {stat.st_size}\n".encode())
            result.update(_sample(path, stat.st_size, stat.st_mtime_ns))
    return result.hexdigest()


def _files(root: Path) -> list[Path]:
    if not root.is_dir():
        return [root] if root.is_file() else []
    below = sorted(path for path in visible_files(root) if path.is_file())
    index = index_of(root)
    if index.is_file():  # beside the components lie pictures and read-me files
        below = [p for p in below if p.parent != root or p.name == index.name]
    return below


@functools.lru_cache(maxsize=4096)  # the checks before a run and the run itself ask about the same files
def _sample(path: Path, size: int, changed: int) -> bytes:
    result = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            result.update(file.read())
        else:
            for i in range(PIECES):
                file.seek((size - PIECE_BYTES) * i // (PIECES - 1))
                result.update(file.read(PIECE_BYTES))
    return result.digest()


def _module_files(modules: str | list[str] | None) -> list[str] | None:
    if modules is None:
        return None
    files = [getattr(sys.modules.get(module_name(name)), "__file__", None) for name in names_of(modules)]
    return [file for file in files if file]


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _any(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _short(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
