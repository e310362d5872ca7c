"""Lumina Image 2.0."""

from verl_omni.pipelines.lumina2.adapter import Lumina2

__all__ = ["Lumina2"]
