"""Every knob, as a field of a dataclass: the only place where it is written down."""

from verl_omni.config.actor import (
    CheckpointConfig,
    DiffusionActorConfig,
    DiffusionLossConfig,
    DiffusionRefConfig,
    EngineConfig,
    FSDPConfig,
    OptimizerConfig,
    VeOmniConfig,
)
from verl_omni.config.model import DiffusionModelConfig
from verl_omni.config.rewriter import RewriterConfig
from verl_omni.config.rollout import (
    CheckpointEngineConfig,
    DiffusionPipelineConfig,
    DiffusionRolloutAlgoConfig,
    DiffusionRolloutConfig,
    DiffusionValKwargs,
    HttpConfig,
    validation_pipeline,
)

__all__ = [
    "CheckpointConfig",
    "CheckpointEngineConfig",
    "DiffusionActorConfig",
    "DiffusionLossConfig",
    "DiffusionModelConfig",
    "DiffusionPipelineConfig",
    "DiffusionRefConfig",
    "DiffusionRolloutAlgoConfig",
    "DiffusionRolloutConfig",
    "DiffusionValKwargs",
    "EngineConfig",
    "FSDPConfig",
    "HttpConfig",
    "OptimizerConfig",
    "RewriterConfig",
    "VeOmniConfig",
    "validation_pipeline",
]
