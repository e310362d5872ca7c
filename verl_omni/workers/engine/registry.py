"""Which training engines there are: each folder here that has STRATEGIES, and what others register with verl."""

import importlib
import pkgutil
import warnings

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.workers import engine as room
from verl_omni.workers.engine.base import DiffusionEngine

with warnings.catch_warnings():  # verl announces every engine whose package is not installed
    warnings.simplefilter("ignore")
    from verl.workers.engine.base import EngineRegistry

MODEL_TYPES = {"policy_gradient": "diffusion_model", "direct_preference": "diffusion_preference_model"}


def built_in() -> dict[str, str]:
    """The module of each `actor.strategy` that has a folder here. The folders are cheap to import, not the engines."""
    names = [found.name for found in pkgutil.iter_modules(room.__path__) if found.ispkg]
    folders = [importlib.import_module(f"{room.__name__}.{name}") for name in names]
    return {name: module for folder in folders for name, module in getattr(folder, "STRATEGIES", {}).items()}


def strategies() -> list[str]:
    """What `actor_rollout_ref.actor.strategy` may be: built in, or registered by an external library."""
    registered = (EngineRegistry._engines.get(kind, {}) for kind in MODEL_TYPES.values())
    return sorted({*built_in(), *(name for backends in registered for name in backends)})


def engine_class(trainer_type: str, strategy: str) -> type[DiffusionEngine]:
    """The engine of a family of algorithms, for the device of this process."""
    if strategy in (modules := built_in()):
        importlib.import_module(modules[strategy])
    return EngineRegistry.get_engine_cls(MODEL_TYPES[trainer_type], strategy)
