"""Qwen-Image."""

from verl_omni.pipelines.qwen_image.adapter import QwenImage

__all__ = ["QwenImage"]
