"""Z-Image and Z-Image-Turbo."""

from verl_omni.pipelines.z_image.adapter import ZImage

__all__ = ["ZImage"]
