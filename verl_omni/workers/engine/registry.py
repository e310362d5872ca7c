"""Which training engines there are: each folder here that has STRATEGIES, and what others register with verl."""

import importlib
import pkgutil
import warnings

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.workers import engine as room
from verl_omni.workers.engine.noise_levels import NoiseLevels
from verl_omni.workers.engine.protocol import MODEL_TYPE, TrainingEngine
from verl_omni.workers.engine.replay import Replay
from verl_omni.workers.engine.reverse_steps import ReverseSteps
from verl_omni.workers.layout import Layout

with warnings.catch_warnings():  # verl announces every engine whose package is not installed
    warnings.simplefilter("ignore")
    from verl.workers.engine.base import EngineRegistry


# How the samples of each family of algorithms are replayed: `algorithm.trainer_type`.
REPLAYS: dict[str, type[Replay]] = {"policy_gradient": ReverseSteps, "direct_preference": NoiseLevels}


def built_in() -> dict[str, str]:
    """The module of each `actor.strategy` that has a folder here. The folders are cheap to import, not the engines."""
    names = [found.name for found in pkgutil.iter_modules(room.__path__) if found.ispkg]
    folders = [importlib.import_module(f"{room.__name__}.{name}") for name in names]
    return {name: module for folder in folders for name, module in getattr(folder, "STRATEGIES", {}).items()}


def strategies() -> list[str]:
    """What `actor_rollout_ref.actor.strategy` may be: built in, or registered by an external library."""
    return sorted({*built_in(), *EngineRegistry._engines.get(MODEL_TYPE, {})})


def engine_class(strategy: str) -> type[TrainingEngine]:
    """The engine of that name, for the device of this process."""
    if strategy in (modules := built_in()):
        importlib.import_module(modules[strategy])
    return EngineRegistry.get_engine_cls(MODEL_TYPE, strategy)


def layout_of(settings: DiffusionTrainerConfig) -> Layout:
    """How the ranks of a run are divided, by the engine that it asks for."""
    actor, trainer = settings.actor_rollout_ref.actor, settings.trainer
    engine = engine_class(actor.strategy)
    return engine.lay_out(engine.settings(actor), trainer.nnodes * trainer.n_gpus_per_node)
