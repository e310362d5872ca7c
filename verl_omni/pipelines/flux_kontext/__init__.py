"""FLUX.1 Kontext."""

from verl_omni.pipelines.flux_kontext.adapter import FluxKontext

__all__ = ["FluxKontext"]
