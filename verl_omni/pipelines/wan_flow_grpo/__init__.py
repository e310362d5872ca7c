"""Wan2.1 and Wan2.2, text to video."""

from verl_omni.pipelines.wan_flow_grpo.diffusers_training_adapter import Experts, Wan

__all__ = ["Experts", "Wan"]
