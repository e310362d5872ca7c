"""Rewards for videos without weights, against their formulas in float64."""

import numpy as np
import pytest
import torch
from PIL import Image

from verl_omni.rewards import check_settings, default_compute_score_image, get_reward_fn
from verl_omni.utils.pictures import as_pil


def video(*levels: int, size=(6, 4)) -> list[Image.Image]:
    """Frames of one grey each."""
    return [Image.new("RGB", size, (level,) * 3) for level in levels]


def noise(frames: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, 4, 6, 3), dtype=np.uint8)


def difference(pixels: np.ndarray) -> float:
    """By the formula, with all pixels at once."""
    x = pixels.astype(np.float64) / 255
    return np.abs(x[1:] - x[:-1]).mean()


@pytest.mark.parametrize("frames", [2, 3, 9])
def test_both_follow_their_formulas(frames):
    pixels = noise(frames, seed=frames)
    d = difference(pixels)
    assert 0.2 < d < 0.5
    for form in ([Image.fromarray(frame) for frame in pixels], pixels, torch.from_numpy(pixels).permute(0, 3, 1, 2)):
        steady = default_compute_score_image("temporal_consistency", form, "")
        assert steady == {"score": pytest.approx(1 - d, abs=1e-12), "frame_difference": pytest.approx(d, abs=1e-12)}
        moving = default_compute_score_image("motion", form, "", enough=0.9)
        assert moving["score"] == pytest.approx(d / 0.9, abs=1e-12)


# levels of grey, temporal consistency, motion with enough=0.1
KNOWN = [
    ((7, 7, 7), 1, 0),
    ((0, 255), 0, 1),
    ((0, 255, 255), 0.5, 1),  # one of the two steps
    ((255, 0, 255, 0), 0, 1),
    ((0, 51, 102), 0.8, 1),
    ((100, 97, 100), 1 - 3 / 255, 30 / 255),
]


@pytest.mark.parametrize(("levels", "consistency", "motion"), KNOWN)
def test_known_videos(levels, consistency, motion):
    videos = [video(*levels), video(*levels[::-1])]
    for name, expected in (("temporal_consistency", consistency), ("motion", motion)):
        assert [a["score"] for a in get_reward_fn(name)(videos)] == pytest.approx([expected] * 2)


def test_what_a_run_hands_over_is_scored():
    """A run's video is a tensor of floats, handed over as PIL images of 8 bits."""
    frames = torch.rand(3, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    (answer,) = get_reward_fn("motion")([as_pil(frames)], enough=1.0)
    assert answer["score"] == pytest.approx(difference((frames.permute(0, 2, 3, 1).numpy() * 255).round()), abs=1e-6)


@pytest.mark.parametrize("name", ["temporal_consistency", "motion"])
def test_what_is_no_video_gets_one_clear_line(name):
    score = get_reward_fn(name)
    with pytest.raises(ValueError, match="it was given a still image: train a model of videos"):
        score([video(0)[0]])
    with pytest.raises(ValueError, match="it was given a video of one frame"):
        score([video(0, 9), video(0)])
    with pytest.raises(ValueError, match="must have one size, and these have 6 x 4 and 8 x 4"):
        score([[*video(0), *video(0, size=(8, 4))]])


def test_settings_are_checked():
    check_settings("motion", {"enough": 0.05})
    with pytest.raises(ValueError, match="reward.scorers.motion.enough=0: expected above 0, at most 1"):
        check_settings("motion", {"enough": 0})
