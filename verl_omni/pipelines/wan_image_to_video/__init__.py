"""Wan, image to video."""

from verl_omni.pipelines.wan_image_to_video.adapter import WanImageToVideo

__all__ = ["WanImageToVideo"]
