"""Do sounds begin where something moves? A reward without weights, from frames and samples alone."""

import math
from typing import Any

import numpy as np

from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.sounds import samples_of

# A sound may be shorter than its video by this share, or by these seconds: LTX-2's is, by 10 to 50 ms.
SHARE, SECONDS = 0.1, 0.06


def motion(video: Any) -> np.ndarray:
    """Of each frame but the first: its mean difference from the one before, over pixels in [0, 1]."""
    if len(video) < 3:
        raise ValueError(f"this reward follows what moves, and a video has {len(video)} frames: expected 3 or more")
    if not video.isfinite().all():  # they would have nothing to do with the sound
        raise ValueError("a video has NaN or infinite pixels: the model that drew it has diverged")
    return np.abs(np.diff(video.float().numpy(), axis=0)).mean(axis=(1, 2, 3))


def onsets(samples: np.ndarray, sample_rate: int, frame_rate: float, frames: int) -> np.ndarray:
    """Of each frame but the first that the sound reaches: how much louder it is in its time than in the one before."""
    if not (math.isfinite(frame_rate) and frame_rate > 0):
        raise ValueError(f"a video has {frame_rate:g} frames a second: expected a number above 0")
    length, seconds = samples.shape[-1], frames / frame_rate
    if seconds - length / sample_rate > max(SHARE * seconds, SECONDS):
        raise ValueError(
            f"a sound of {length / sample_rate:.3f} s is too short for a video of {seconds:.3f} s ({frames} frames at "
            f"{frame_rate:g} a second): expected at most {SHARE:.0%} less"
        )
    ends = np.round(np.arange(frames + 1) * sample_rate / frame_rate).astype(int)
    starts = ends[:-1][ends[:-1] < length]
    if len(starts) < 3:
        raise ValueError(f"this reward compares frame by frame, and a sound reaches {len(starts)}: expected 3 or more")
    parts = [samples[:, start:end] for start, end in zip(starts, ends[1:], strict=False)]
    level = np.array([np.sqrt(np.mean(np.square(part))) if part.size else 0.0 for part in parts])
    return np.maximum(np.diff(level), 0)


@register_reward("audio_video_sync")
def compute_score_audio_video_sync(
    videos: list, audios: list, sample_rates: list[int], frame_rates: list[float], *_: Any
) -> list[dict[str, float]]:
    """Do sounds begin where something moves? The correlation of onsets and motion, frame by frame: -1 to 1.

    Motion is how much a frame differs from the one before, an onset how much louder the sound is in its time. Frames
    after the sound's end are left out. Where nothing moves, all moves alike or no sound begins, they have nothing to
    do with each other: 0.
    """
    answers = []
    for video, audio, sample_rate, frame_rate in zip(videos, audios, sample_rates, frame_rates, strict=True):
        moves = motion(video)
        begins = onsets(samples_of(audio, sample_rate), sample_rate, frame_rate, len(video))
        moves = moves[: len(begins)]
        moves, begins = moves - moves.mean(), begins - begins.mean()
        size = np.linalg.norm(moves) * np.linalg.norm(begins)
        answers.append({"score": float(moves @ begins / size) if size > 1e-12 else 0.0})
    return answers
