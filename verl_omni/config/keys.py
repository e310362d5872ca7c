"""Which keys a configuration has: those of the dataclasses, and any below the dicts that are open."""

import functools
from typing import Any

from omegaconf import DictConfig, OmegaConf, ValidationError

from verl_omni.config import schema
from verl_omni.config.knob import UNSAID, moved_names, typed
from verl_omni.utils.suggest import nearest

# In these and below, keys are the business of one algorithm, reward or engine.
OPEN = ("extra", "scorers", "reward_kwargs", "reward_weights", "engine_kwargs", "teacher.path")


def is_open(key: str) -> bool:
    return any(f".{end}." in f"{key}." for end in OPEN)


@functools.cache  # takes 80 ms
def structured() -> DictConfig:
    """All keys with their defaults, to read and to merge others into."""
    return OmegaConf.structured(schema.DiffusionTrainerConfig)


@functools.cache
def known_keys() -> frozenset[str]:
    """Every key that may be overridden, groups included."""
    return frozenset(_keys(structured()))


def check_keys(keys: Any) -> None:
    """Raise one line where a key is none, with the nearest that is one."""
    known = known_keys()
    for key in keys:
        if key not in known and not is_open(key):
            raise ValueError(f'unknown config key "{key}".{nearest(key, known)} `--help all` lists all of them')


def check_keys_of(config: DictConfig) -> None:
    """A key that was added by force (`+a.b=1`) and that nothing reads is refused too."""
    check_keys(_keys(config))


def take_moved(config: DictConfig) -> list[str]:
    """Take what was written at earlier places to where it belongs; one line for each, with the new name."""
    lines = []
    for earlier, name in moved_names(schema.DiffusionTrainerConfig).items():
        value = OmegaConf.select(config, earlier)
        if value == UNSAID:
            continue
        try:
            OmegaConf.update(config, name, value)
        except ValidationError as error:
            raise ValueError(f"{earlier}={value}, which is called {name} now: {str(error).splitlines()[0]}") from None
        OmegaConf.update(config, earlier, UNSAID)
        lines.append(f"{earlier} is called {name} now: {name}={typed(value)}")
    return lines


def _keys(node: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for key in node:
        keys.append(f"{prefix}{key}")
        child = node._get_node(key)
        if OmegaConf.is_dict(child) and not child._is_interpolation() and not child._is_none():
            keys += _keys(child, f"{prefix}{key}.")
    return keys


def with_plus(argument: str) -> str:
    """Hydra wants `++` before a key that no dataclass names; the user should not have to know which those are."""
    key = argument.split("=")[0]
    return f"++{argument}" if "=" in argument and key[:1].isalpha() and is_open(key) else argument
