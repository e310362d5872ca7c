"""How much of a sound is silent: a reward without weights, against models that stop in the middle."""

from typing import Annotated, Any

from verl_omni.config.knob import Range
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.sounds import loudness_of, samples_of, windows

Decibels = Annotated[float, Range(least=-120, most=0)]
Seconds = Annotated[float, Range(least=0.001, most=10)]


@register_reward("silence")
def compute_score_silence(
    audios: list, sample_rates: list[int], *_: Any, below: Decibels = -50.0, window: Seconds = 0.02
) -> list[dict[str, float]]:
    """The less of a sound is silent, the better: 1 - the share of its time that is.

    Windows of ``window`` seconds follow each other; silent are those whose root mean square is ``below`` so many
    decibels, or just as many. Answers with the share too.
    """
    answers = []
    for audio, rate in zip(audios, sample_rates, strict=True):
        parts = windows(samples_of(audio, rate), max(1, round(window * rate)))
        share = sum(part.shape[-1] for part in parts if loudness_of(part) <= below) / audio.shape[-1]
        answers.append({"score": 1 - share, "silent_share": share})
    return answers
