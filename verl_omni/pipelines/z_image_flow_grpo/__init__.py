"""Z-Image and Z-Image-Turbo."""

from verl_omni.pipelines.z_image_flow_grpo.diffusers_training_adapter import ZImage

__all__ = ["ZImage"]
