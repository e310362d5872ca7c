"""How much of a sound is silent: a reward without weights, against models that stop in the middle."""

from typing import Annotated, Any

from verl_omni.config.knob import Range
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.sounds import loudness_of, mono, windows

Decibels = Annotated[float, Range(least=-120, most=0)]
Seconds = Annotated[float, Range(least=0.001, most=10)]


@register_reward("silence")
def compute_score_silence(
    audios: list, sample_rates: list[int], *_: Any, below: Decibels = -50.0, window: Seconds = 0.02
) -> list[dict[str, float]]:
    """The less of a sound is silent, the better: 1 - the share of its windows that are.

    Windows of ``window`` seconds follow each other; silent are those whose root mean square is ``below`` so many
    decibels. Answers with the share too.
    """
    answers = []
    for audio, rate in zip(audios, sample_rates, strict=True):
        levels = [loudness_of(part) for part in windows(mono(audio, rate), max(1, round(window * rate)))]
        share = sum(level < below for level in levels) / len(levels)
        answers.append({"score": 1 - share, "silent_share": share})
    return answers
