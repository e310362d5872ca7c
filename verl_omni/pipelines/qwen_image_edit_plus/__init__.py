"""Qwen-Image-Edit (2509 and later): one or more reference images and an instruction."""

from verl_omni.pipelines.qwen_image_edit_plus.adapter import QwenImageEditPlus

__all__ = ["QwenImageEditPlus"]
