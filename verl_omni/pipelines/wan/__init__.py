"""Wan2.1 and Wan2.2, text to video."""

from verl_omni.pipelines.wan.adapter import Experts, Wan

__all__ = ["Experts", "Wan"]
