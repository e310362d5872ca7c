"""Qwen-Image. The vLLM-Omni side is imported by name, because it needs that package."""

from verl_omni.pipelines.qwen_image_flow_grpo.diffusers_training_adapter import QwenImage

__all__ = ["QwenImage"]
