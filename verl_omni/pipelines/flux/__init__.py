"""FLUX.1 (dev and schnell)."""

from verl_omni.pipelines.flux.adapter import Flux

__all__ = ["Flux"]
