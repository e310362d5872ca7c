"""How far apart the images of one prompt are, seen coarsely and without a model."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from verl_omni.utils.responses import Response

SIDE = 16  # pixels of the small copy of an image
LOOKED_AT = 128  # of the pixels on a side, no more than about so many: a large image takes no longer
FRAMES = 4  # of a video


def coarse(response: "Response") -> np.ndarray | None:
    """A small copy of an image, or of a few frames of a video: 256 steps a colour, whatever the size was.

    None of a sound, a text, or latents, of which nobody here knows how far apart they look; and of pixels that are not
    finite, of which the reward has something to say.
    """
    import torch

    from verl_omni.utils.responses import kind_of, pixels_of

    if not kind_of(response).is_seen:
        return None
    pixels = pixels_of(response)
    if pixels.ndim == 4:
        pixels = pixels[np.linspace(0, len(pixels) - 1, FRAMES).round().astype(int)]
    pixels = pixels[..., :: max(1, pixels.shape[-2] // LOOKED_AT), :: max(1, pixels.shape[-1] // LOOKED_AT)]
    scale = 255.0 if pixels.is_floating_point() else 1.0
    small = torch.nn.functional.adaptive_avg_pool2d(pixels.float() * scale, SIDE)
    return small.round().clamp(0, 255).byte().numpy() if small.isfinite().all() else None


def mean_distance(groups: Iterable[Sequence[np.ndarray | None]]) -> float | None:
    """Mean over all pairs within the groups of how far two pictures (256 steps) are apart: the root of the mean squared
    difference of their pixels, 0 to 1. None where there is no pair; what is no picture is in none.
    """
    distances: list[np.ndarray] = []
    for group in groups:
        seen = [picture.ravel() / 255 for picture in group if picture is not None]
        distances += [np.sqrt(((seen[i] - np.stack(seen[:i])) ** 2).mean(axis=1)) for i in range(1, len(seen))]
    return float(np.concatenate(distances).mean()) if distances else None
