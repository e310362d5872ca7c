"""Pixels as pictures: for rewards that look at them, and for people."""

import io
from typing import Any

import torch


def as_pil(image: torch.Tensor) -> Any:
    """PIL image of a tensor, uint8 or floats in [0, 1]; a list of them for a video. NaN is an error."""
    from PIL import Image

    if image.ndim == 4:
        return [as_pil(frame) for frame in image]
    if not image.isfinite().all():
        raise ValueError("an image has NaN or infinite pixels: the model that drew it has diverged")
    pixels = image if image.dtype == torch.uint8 else (image * 255).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def picture_file(pixels: torch.Tensor) -> tuple[bytes, str]:
    """An image as a PNG file, a video as an animation: (what is in the file, the ending of its name)."""
    picture, file = as_pil(pixels), io.BytesIO()
    if isinstance(picture, list):
        picture[0].save(file, "GIF", save_all=True, append_images=picture[1:], duration=125, loop=0)
        return file.getvalue(), "gif"
    picture.save(file, "PNG")
    return file.getvalue(), "png"
