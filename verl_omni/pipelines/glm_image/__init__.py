"""GLM-Image."""

from verl_omni.pipelines.glm_image.adapter import GlmImage

__all__ = ["GlmImage"]
