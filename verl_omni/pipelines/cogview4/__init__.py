"""CogView4."""

from verl_omni.pipelines.cogview4.adapter import CogView4

__all__ = ["CogView4"]
