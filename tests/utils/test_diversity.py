"""How far apart the images of a prompt are, by hand."""

import numpy as np
import pytest
import torch

from benchmarks.learning import diversity
from verl_omni.utils.diversity import FRAMES, SIDE, coarse, mean_distance
from verl_omni.utils.pictures import as_pil
from verl_omni.utils.responses import Latents, Sound, VideoWithSound


def grey(level: int, height: int = 32, width: int = 64) -> torch.Tensor:
    return torch.full((3, height, width), level, dtype=torch.uint8)


def test_the_distance_of_two_images_is_that_of_their_pixels():
    black, white, dark = (coarse(grey(level)) for level in (0, 255, 51))
    assert black.shape == (3, SIDE, SIDE) and black.dtype == np.uint8
    assert mean_distance([[black, white]]) == 1 and mean_distance([[black, black]]) == 0
    assert mean_distance([[black, white, dark]]) == pytest.approx((1 + 0.2 + 0.8) / 3)
    assert mean_distance([[black, white], [dark, dark]]) == 0.5
    half = grey(0)
    half[:, :, :32] = 255
    assert mean_distance([[black, coarse(half)]]) == pytest.approx(0.5**0.5)


def test_only_images_of_one_prompt_are_compared():
    black, white = coarse(grey(0)), coarse(grey(255))
    assert mean_distance([[black, black], [white, white]]) == 0
    assert mean_distance([[black], [white]]) is None and mean_distance([]) is None


@pytest.mark.parametrize("size", [(32, 32), (128, 128), (256, 512), (2048, 1024)])
def test_a_large_image_is_seen_as_a_small_one(size):
    """Squares on a board: whatever the size, the small copy has the colour of each."""
    board = torch.arange(SIDE)[:, None] + torch.arange(SIDE) * 4
    large = board.repeat_interleave(size[0] // SIDE, 0).repeat_interleave(size[1] // SIDE, 1)
    assert (coarse(large.expand(3, -1, -1).to(torch.uint8)) == board.numpy()).all()


def test_noise_is_averaged_away():
    """Two images that differ in each pixel by chance are near each other."""
    one, other = (coarse(torch.rand(3, 128, 128, generator=torch.Generator().manual_seed(seed))) for seed in (0, 1))
    assert mean_distance([[one, other]]) == pytest.approx((2 / 12 / 64) ** 0.5, rel=0.1)  # 64 pixels each, uniform


def test_of_a_video_some_frames_are_seen():
    frames = torch.stack([grey(level) for level in range(0, 100, 10)])
    assert coarse(frames)[:, 0, 0, 0].tolist() == [0, 30, 60, 90] and FRAMES == 4
    sounding = VideoWithSound(frames, Sound(torch.zeros(1, 100), 100), 10.0)
    assert (coarse(sounding) == coarse(frames)).all()
    assert coarse(frames[:1]).shape == (FRAMES, 3, SIDE, SIDE)


def test_what_is_not_seen_has_no_distance():
    sound, latents = Sound(torch.zeros(1, 100), 100), Latents(torch.zeros(4, 4))
    assert [coarse(one) for one in (sound, "a text", latents, torch.full((3, 8, 8), float("nan")))] == [None] * 4
    assert mean_distance([[None, None]]) is None


def test_the_benchmark_measures_the_same(tmp_path):
    """Its images of 64 pixels, at a quarter of their size, are these small copies."""
    images = torch.randint(0, 256, (3, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for i, image in enumerate(images):
        as_pil(image).save(tmp_path / f"{i}.png")
    of_files = diversity({"a cat": [tmp_path / f"{i}.png" for i in range(3)]})
    assert of_files == pytest.approx(mean_distance([[coarse(image) for image in images]]), abs=1e-4)
