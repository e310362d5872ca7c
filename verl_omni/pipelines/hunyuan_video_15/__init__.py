"""HunyuanVideo-1.5."""

from verl_omni.pipelines.hunyuan_video_15.adapter import HunyuanVideo15

__all__ = ["HunyuanVideo15"]
