"""How a video moves, from its pixels alone: two rewards without weights, for trying things out."""

from typing import Annotated, Any

import numpy as np

from verl_omni.config.knob import Range
from verl_omni.rewards.images import frames_of, to_rgb_array
from verl_omni.rewards.registry import register_reward

Difference = Annotated[float, Range(above=0, most=1)]


def frame_difference(video: Any) -> float:
    """d = mean of |x[t+1] - x[t]| over all neighbouring frames, pixels and channels, with x in [0, 1]: 0 to 1."""
    frames = frames_of(video)
    if frames is None or len(frames) < 2:
        given = "a still image" if frames is None else "a video of one frame"
        raise ValueError(
            f"this reward compares neighbouring frames of a video, and it was given {given}: train a model of videos "
            "with two frames or more, or choose another data_source"
        )
    arrays = [to_rgb_array(frame).astype(np.int16) for frame in frames]
    sizes = sorted({f"{a.shape[1]} x {a.shape[0]}" for a in arrays})
    if len(sizes) > 1:
        raise ValueError(f"the frames of a video must have one size, and these have {' and '.join(sizes)}")
    steps = [np.abs(later - earlier).mean() for earlier, later in zip(arrays, arrays[1:], strict=False)]
    return float(np.mean(steps)) / 255


@register_reward("temporal_consistency")
def compute_score_temporal_consistency(images: list, *_: Any) -> list[dict[str, float]]:
    """The less neighbouring frames differ, the better: 1 - their mean difference. A frozen video has a 1."""
    differences = [frame_difference(video) for video in images]
    return [{"score": 1 - d, "frame_difference": d} for d in differences]


@register_reward("motion")
def compute_score_motion(images: list, *_: Any, enough: Difference = 0.1) -> list[dict[str, float]]:
    """The more neighbouring frames differ, the better, up to ``enough``: min(d / enough, 1). A frozen video has a 0."""
    differences = [frame_difference(video) for video in images]
    return [{"score": min(d / enough, 1.0), "frame_difference": d} for d in differences]
