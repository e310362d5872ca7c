"""Stable Diffusion 3 and 3.5 (medium and large)."""

from verl_omni.pipelines.sd3_flow_grpo.diffusers_training_adapter import StableDiffusion3

__all__ = ["StableDiffusion3"]
