"""FLUX.2: dev (guidance as an input) and klein (classifier-free guidance, or none in its distilled form)."""

from verl_omni.pipelines.flux2.adapter import Flux2, Flux2Klein

__all__ = ["Flux2", "Flux2Klein"]
