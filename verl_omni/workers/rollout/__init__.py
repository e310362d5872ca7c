"""Rollout engines: base.py is the protocol. One of your own registers itself here (`register_rollout`)."""

import importlib
from typing import Any

from verl_omni.utils.registry import Registry

# actor_rollout_ref.rollout.name -> the engine, and the engine in a process of its own; imported when they are asked for
BUILT_IN = {
    "diffusers": ("diffusers_rollout.DiffusersRollout", "diffusers_server.DiffusersServer"),
    "vllm_omni": ("vllm_rollout.engine.VllmOmniRollout", "vllm_rollout.server.VllmOmniServer"),
}
_OWN: Registry[tuple[type, type]] = Registry("rollout engine")


def register_rollout(name: str, server: type) -> Any:
    """Class decorator: `actor_rollout_ref.rollout.name=<name>` draws with this engine (a `BatchedRollout` that can sit
    beside training), and on devices of its own with `server` (a `RolloutServer`)."""
    if name in BUILT_IN:
        raise ValueError(f'rollout engine "{name}" is built in: choose another name')

    def wrap(engine: type) -> type:
        _OWN.add(name, (engine, server), defined_by=engine)
        return engine

    return wrap


def engines() -> list[str]:
    """What `actor_rollout_ref.rollout.name` may be: built in, or registered by an external library."""
    return [*BUILT_IN, *_OWN.names()]


def engine_class(name: str) -> type:
    return _find(BUILT_IN[name][0]) if name in BUILT_IN else _OWN.get(name)[0]


def server_class(name: str) -> type:
    return _find(BUILT_IN[name][1]) if name in BUILT_IN else _OWN.get(name)[1]


def _find(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
