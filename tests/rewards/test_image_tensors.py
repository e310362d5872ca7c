"""Images made ready in torch, with a gradient, against what PIL and the models' own processors make of them."""

import numpy as np
import pytest
import torch
from tiny_scorers import CLIP_STD, SIDE, as_pixels, pictures
from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil

from verl_omni.rewards.image_tensors import prepared, resized
from verl_omni.rewards.scorers.image_reward import centre_square, centre_squares
from verl_omni.utils.errors import RunError

SHAPES = ((48, 48), (40, 64), (90, 50), (300, 220))
CLIP = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SIDE)
SIGLIP = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, resample=2)


def steps(pixels: torch.Tensor, wanted: np.ndarray, std: list[float]) -> np.ndarray:
    """How many of the 255 steps that a picture has they are apart."""
    return np.abs(pixels[0].double().numpy() - wanted) * np.reshape(std, (3, 1, 1)) * 255


@pytest.mark.parametrize("processor", [CLIP, SIGLIP], ids=["clip", "siglip"])
def test_pixels_are_those_of_the_processor_but_for_its_rounding(processor):
    """PIL rounds and clips twice, after rows and after columns: less than two steps for these images."""
    for picture in pictures(*SHAPES):
        wanted = processor(images=[picture])["pixel_values"][0]
        off = steps(prepared(as_pixels(picture), processor), wanted, processor.image_std)
        assert off.max() < 2 and off.mean() < 0.35


def test_the_square_of_image_reward_is_that_of_pil():
    for picture in pictures(*SHAPES):
        off = steps(centre_squares(as_pixels(picture), SIDE), centre_square(picture, SIDE), CLIP_STD)
        assert off.max() < 2 and off.mean() < 0.35


def test_another_resampling_is_refused_in_one_line():
    with pytest.raises(RunError, match="PIL's resampling 1, which has no gradient here"):
        resized(torch.zeros(1, 3, 4, 4), (2, 2), 1)
