"""LTX-2."""

from verl_omni.pipelines.ltx2.adapter import LTX2, LTX2ImageToVideo

__all__ = ["LTX2", "LTX2ImageToVideo"]
