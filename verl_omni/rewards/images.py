"""One form of an image, and of the frames of a video, for all rewards."""

from typing import Any

import numpy as np


def to_rgb_array(image: Any) -> np.ndarray:
    """An image as uint8 of shape (height, width, 3).

    Takes a torch tensor (channels, height, width), a numpy array (height, width, channels), both of floats in [0, 1]
    or of uint8, or a PIL image. Floats beyond [0, 1] are clipped; NaN is an error.
    """
    if hasattr(image, "convert"):  # PIL
        return np.array(image.convert("RGB"))
    if hasattr(image, "detach"):  # torch; bfloat16 has no numpy type
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
        if image.ndim == 3:
            image = image.transpose(1, 2, 0)
    if not isinstance(image, np.ndarray):
        raise TypeError(f"an image must be a torch tensor, a numpy array or a PIL image, and this is {type(image)}")
    if image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(
            "an image must be a tensor (channels, height, width) or an array (height, width, channels) with 1 or 3 "
            f"channels, and as an array this one has the shape {image.shape}"
        )
    if image.dtype != np.uint8:
        if not np.issubdtype(image.dtype, np.floating):
            raise TypeError(f"pixels must be floats in [0, 1] or uint8, and these are {image.dtype}")
        if not np.isfinite(image).all():
            raise ValueError("an image has NaN or infinite pixels: the model that drew it has diverged")
        image = (image.clip(0, 1) * 255).round().astype(np.uint8)
    return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image


def frames_of(image: Any) -> list | None:
    """The frames of a video, or None for a still image.

    A video is a list of images, or a tensor or array with frames as its first dimension.
    """
    if not isinstance(image, list | tuple) and getattr(image, "ndim", None) != 4:
        return None
    if not len(image):
        raise ValueError("a video has no frames")
    return list(image)


def pictures_of(image: Any, count: int | None = None) -> list[Any]:
    """The RGB pictures (PIL) of an image, which is one, or of a video.

    With `count`, that many frames of a video: the middle ones of as many equal parts. A shorter video gives all it has.
    """
    from PIL import Image

    frames = frames_of(image) or [image]
    if count is not None and count < len(frames):
        frames = [frames[int((part + 0.5) * len(frames) / count)] for part in range(count)]
    return [Image.fromarray(to_rgb_array(frame)) for frame in frames]
