"""How loud a sound is: a reward without weights, for trying things out."""

from typing import Annotated, Any

from verl_omni.config.knob import Range
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.sounds import loudness_of, samples_of

Decibels = Annotated[float, Range(least=-120, most=0)]
Width = Annotated[float, Range(above=0, most=120)]


@register_reward("loudness")
def compute_score_loudness(
    audios: list, sample_rates: list[int], *_: Any, target: Decibels = -20.0, width: Width = 20.0
) -> list[dict[str, float]]:
    """The nearer a sound is to ``target`` decibels, the better: 1 - |level - target| / width, at least 0.

    The level is the root mean square of all samples of all channels, 0 dB for the loudest square wave. Answers with
    it too.
    """
    levels = [loudness_of(samples_of(*sound)) for sound in zip(audios, sample_rates, strict=True)]
    return [{"score": max(0.0, 1 - abs(level - target) / width), "decibels": level} for level in levels]
