"""How well an image compresses: the two simplest rewards of DDPO (arXiv 2305.13301), for trying things out."""

import io
from typing import Annotated, Any

from verl_omni.config.knob import Range
from verl_omni.rewards.images import to_rgb_array
from verl_omni.rewards.registry import register_reward

Quality = Annotated[int, Range(least=1, most=95)]


def jpeg_kilobytes(image: Any, quality: int = 95) -> float:
    """Size of the image as a JPEG file, in units of 1000 bytes."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(to_rgb_array(image)).save(file, "JPEG", quality=quality)
    return file.tell() / 1000


@register_reward("jpeg_incompressibility")
def compute_score_incompressibility(images: list, *_: Any, quality: Quality = 95) -> list[dict[str, float]]:
    """The larger the file, the better: the score is its size in kilobytes."""
    return [{"score": jpeg_kilobytes(image, quality)} for image in images]


@register_reward("jpeg_compressibility")
def compute_score_compressibility(images: list, *_: Any, quality: Quality = 95) -> list[dict[str, float]]:
    """The smaller the file, the better: the score is minus its size in kilobytes."""
    return [{"score": -jpeg_kilobytes(image, quality)} for image in images]
