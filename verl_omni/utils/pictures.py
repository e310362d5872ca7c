"""Pixels as pictures: for rewards that look at them, and for people."""

import importlib.util
import io
from typing import Any

import torch

FRAME_RATE = 8.0  # of videos that do not say theirs


def as_pil(image: torch.Tensor) -> Any:
    """PIL image of a tensor, uint8 or floats in [0, 1]; a list of them for a video. NaN is an error."""
    from PIL import Image

    if image.ndim == 4:
        return [as_pil(frame) for frame in image]
    return Image.fromarray(in_bytes(image).permute(1, 2, 0).contiguous().numpy())


def in_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """In 256 steps, of floats in [0, 1] too."""
    if not pixels.isfinite().all():
        raise ValueError("an image has NaN or infinite pixels: the model that drew it has diverged")
    return pixels if pixels.dtype == torch.uint8 else (pixels * 255).round().clamp(0, 255).to(torch.uint8)


def picture_file(pixels: torch.Tensor) -> tuple[bytes, str]:
    """An image as a PNG file: (what is in the file, the ending of its name)."""
    file = io.BytesIO()
    as_pil(pixels).save(file, "PNG")
    return file.getvalue(), "png"


def video_file(frames: torch.Tensor, frame_rate: float = FRAME_RATE) -> tuple[bytes, str]:
    """A video as an mp4 file, or as an animation (GIF) where PyAV is not installed."""
    if importlib.util.find_spec("av") is None:
        return animation(as_pil(frames), frame_rate), "gif"
    from verl_omni.utils.movies import mp4_file

    return mp4_file(in_bytes(frames), frame_rate), "mp4"


def animation(frames: list[Any], frame_rate: float = FRAME_RATE) -> bytes:
    """Frames (PIL) as a GIF file, which counts in hundredths of a second."""
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=int(1000 / frame_rate), loop=0)
    return file.getvalue()
