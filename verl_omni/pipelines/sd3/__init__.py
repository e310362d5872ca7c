"""Stable Diffusion 3 and 3.5 (medium and large)."""

from verl_omni.pipelines.sd3.adapter import StableDiffusion3

__all__ = ["StableDiffusion3"]
