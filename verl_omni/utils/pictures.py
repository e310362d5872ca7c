"""Pixels as pictures: for rewards that look at them, and for people."""

from pathlib import Path
from typing import Any

import torch


def as_pil(image: torch.Tensor) -> Any:
    """PIL image of a tensor, uint8 or floats in [0, 1]; a list of them for a video."""
    from PIL import Image

    if image.ndim == 4:
        return [as_pil(frame) for frame in image]
    pixels = image if image.dtype == torch.uint8 else (image * 255).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def write_image(pixels: torch.Tensor, file: Path) -> str:
    """Write an image as `<file>.png`, a video as an animation; the file's name."""
    picture, file = as_pil(pixels), Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(picture, list):
        path = file.with_name(f"{file.name}.gif")
        picture[0].save(path, save_all=True, append_images=picture[1:], duration=125, loop=0)
    else:
        path = file.with_name(f"{file.name}.png")
        picture.save(path)
    return path.name
