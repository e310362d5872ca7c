"""Settings of a run on several machines, whose processes start in other folders, homes and environments."""

import os
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.trainer.checks.hub_names import DATA, MODEL, OTHERS
from verl_omni.utils import hub
from verl_omni.utils.external_lib import is_file, names_of
from verl_omni.utils.secrets import is_reference

RUN_DIR = "trainer.default_local_dir"
# Beside what may be a name on the hub. What they name is there before a run.
FILES = (
    "actor_rollout_ref.actor.teacher.path",
    "actor_rollout_ref.ref.path",
    "actor_rollout_ref.rollout.http.token_file",
    "reward.custom_reward_function.path",
    "reward.validation.custom_reward_function.path",
    "reward.reward_manager.module.path",
    "trainer.resume_from_path",
    "trainer.replay",
)
CALLBACKS = "trainer.callbacks"
EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"
# Arguments of rewards: of these only what looks like a path, and is one here.
ARGUMENTS = tuple(
    f"reward.{whose}{name}"
    for whose in ("", "validation.")
    for name in ("scorers", "custom_reward_function.reward_kwargs")
)

# Set for every process by the run itself.
OWN_VARIABLES = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "VERL_PLATFORM", "TOKENIZERS_PARALLELISM")

Change = Callable[[str, str], str]  # of a setting and its path


def check_variables(settings: DiffusionTrainerConfig) -> None:
    """What is to be taken along is here, and no variable of the run's own."""
    for name in settings.ray.env_vars:
        if name in OWN_VARIABLES:
            raise ValueError(f"ray.env_vars: {name} is set for every process by the run itself: leave it out")
        if name not in os.environ:
            raise ValueError(f"ray.env_vars: there is no environment variable {name} here: set it, or leave it out")


def variables_of_rewards(config: DictConfig) -> list[tuple[str, str]]:
    """(setting, variable) of all that arguments of rewards name."""
    return [found for setting in ARGUMENTS for found in _variables(_plain(config, setting), setting)]


def _variables(tree: Any, setting: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _variables(value, f"{setting}.{key}")
    elif isinstance(tree, list):
        for value in tree:
            yield from _variables(value, setting)
    elif is_reference(tree) and tree.startswith("env:"):
        yield setting, tree.removeprefix("env:")
    elif isinstance(tree, str) and setting.endswith(".token_env"):
        yield setting, tree


def with_absolute_paths(config: DictConfig) -> DictConfig:
    """The same settings, in which every path means the same in any folder and for any user."""
    change_paths(config, lambda _, path: os.path.abspath(os.path.expanduser(path)))
    _set(config, RUN_DIR, os.path.abspath(os.path.expanduser(config.trainer.default_local_dir)))
    return config


def needed_paths(config: DictConfig) -> list[tuple[str, str]]:
    """(setting, path) of all that the processes of a run read."""
    found = []
    change_paths(config.copy(), lambda setting, path: found.append((setting, path)) or path)
    return found


def change_paths(config: DictConfig, change: Change) -> None:
    """Whatever names a file or folder of the user's becomes what `change` says; a name on the hub stays one."""
    for setting in (MODEL, *OTHERS, *DATA, *FILES):
        _replace(config, setting, lambda name, value: value if _is_remote(value) else change(name, value))
    _replace(config, CALLBACKS, lambda name, value: _callback(name, value, change))
    _replace(config, EXTERNAL_LIB, lambda name, value: _modules(name, value, change))
    for setting in ARGUMENTS:
        _replace(config, setting, lambda name, value: _argument(name, value, change))


def _callback(setting: str, spec: str, change: Change) -> str:
    place, colon, name = spec.rpartition(":")
    return f"{change(setting, place)}:{name}" if colon and place.endswith(".py") else spec


def _modules(setting: str, names: str, change: Change) -> str:
    return ",".join(change(setting, name) if is_file(name) else name for name in names_of(names))


def _argument(setting: str, value: str, change: Change) -> str:
    if is_reference(value):
        kind, _, place = value.partition(":")
        return f"file:{change(setting, place)}" if kind == "file" else value
    looks = os.sep in value or value.startswith("~") or setting.endswith(".model")
    return change(setting, value) if looks and os.path.exists(os.path.expanduser(value)) else value


def _is_remote(value: str) -> bool:
    return "://" in value or hub.named(value) is not None


def _replace(config: DictConfig, setting: str, change: Change) -> None:
    given = _plain(config, setting)
    if (changed := _mapped(given, setting, change)) != given:
        _set(config, setting, changed)


def _plain(config: DictConfig, setting: str) -> Any:
    given = OmegaConf.select(config, setting)
    return OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given


def _mapped(tree: Any, setting: str, change: Change) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(value, f"{setting}.{key}", change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_mapped(value, setting, change) for value in tree]
    return change(setting, tree) if isinstance(tree, str) and tree else tree


def _set(config: DictConfig, setting: str, value: Any) -> None:
    OmegaConf.update(config, setting, value, merge=False, force_add=True)
