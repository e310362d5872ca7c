"""LongCat-AudioDiT."""

from verl_omni.pipelines.longcat_audio.adapter import LongCatAudio

__all__ = ["LongCatAudio"]
