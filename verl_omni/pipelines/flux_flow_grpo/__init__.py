"""FLUX.1 (dev and schnell)."""

from verl_omni.pipelines.flux_flow_grpo.diffusers_training_adapter import Flux

__all__ = ["Flux"]
