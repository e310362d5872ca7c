"""Rollout engines: base.py is the protocol."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_omni.workers.rollout.server import RolloutServer

# actor_rollout_ref.rollout.name -> the engine, and the engine in a process of its own
ENGINES = {
    "diffusers": ("diffusers_rollout.DiffusersRollout", "diffusers_server.DiffusersServer"),
    "vllm_omni": ("vllm_rollout.engine.VllmOmniRollout", "vllm_rollout.server.VllmOmniServer"),
}


def engine_class(name: str) -> type:
    return _find(ENGINES[name][0])


def server_class(name: str) -> type["RolloutServer"]:
    return _find(ENGINES[name][1])


def _find(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
