"""Chroma."""

from verl_omni.pipelines.chroma.adapter import Chroma

__all__ = ["Chroma"]
