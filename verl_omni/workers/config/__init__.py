"""Config dataclasses of the workers. A field here is the only place where a knob is written down."""

from verl_omni.workers.config.diffusion.actor import (
    CheckpointConfig,
    DiffusionActorConfig,
    DiffusionLossConfig,
    DiffusionRefConfig,
    FSDPConfig,
    OptimizerConfig,
)
from verl_omni.workers.config.diffusion.model import DiffusionModelConfig
from verl_omni.workers.config.diffusion.rollout import (
    DiffusionPipelineConfig,
    DiffusionRolloutAlgoConfig,
    DiffusionRolloutConfig,
    DiffusionValKwargs,
    validation_pipeline,
)

__all__ = [
    "CheckpointConfig",
    "DiffusionActorConfig",
    "DiffusionLossConfig",
    "DiffusionModelConfig",
    "DiffusionPipelineConfig",
    "DiffusionRefConfig",
    "DiffusionRolloutAlgoConfig",
    "DiffusionRolloutConfig",
    "DiffusionValKwargs",
    "FSDPConfig",
    "OptimizerConfig",
    "validation_pipeline",
]
