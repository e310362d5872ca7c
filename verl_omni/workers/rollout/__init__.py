"""Rollout engines, a folder each; base.py is the protocol. One of your own registers itself (`register_rollout`)."""

import functools
import importlib
import pkgutil
from typing import Any, NamedTuple

from verl_omni.utils.registry import Registry


class Listed(NamedTuple):
    """In `ENGINES` of a folder's `__init__`, which is cheap to import: where an engine is, for when it is asked for."""

    engine: str
    #: the engine in a process of its own
    server: str
    #: whether its process may be a fork of one that has imported libraries before
    forks: bool = False


_OWN: Registry[tuple[type, type]] = Registry("rollout engine")


@functools.cache
def built_in() -> dict[str, Listed]:
    """actor_rollout_ref.rollout.name -> the engine that has a folder here."""
    names = [found.name for found in pkgutil.iter_modules(__path__) if found.ispkg]
    folders = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {name: listed for folder in folders for name, listed in getattr(folder, "ENGINES", {}).items()}


def register_rollout(name: str, server: type) -> Any:
    """Class decorator: `actor_rollout_ref.rollout.name=<name>` draws with this engine (a `BatchedRollout` that can sit
    beside training), and on devices of its own with `server` (a `RolloutServer`)."""
    if name in built_in():
        raise ValueError(f'rollout engine "{name}" is built in: choose another name')

    def wrap(engine: type) -> type:
        _OWN.add(name, (engine, server), defined_by=engine)
        return engine

    return wrap


def engines() -> list[str]:
    """What `actor_rollout_ref.rollout.name` may be: built in, or registered by an external library."""
    return [*built_in(), *_OWN.names()]


def engine_class(name: str) -> type:
    return _find(built_in()[name].engine) if name in built_in() else _OWN.get(name)[0]


def server_class(name: str) -> type:
    return _find(built_in()[name].server) if name in built_in() else _OWN.get(name)[1]


def forks(name: str) -> bool:
    """Asked before anything of the user's is imported: of an engine from outside nobody knows."""
    return name in built_in() and built_in()[name].forks


def _find(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
