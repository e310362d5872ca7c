"""How bright an image or a video is: a reward that changes as little as the picture does."""

import asyncio

import numpy as np


def compute_score(image) -> float:
    frames = image if isinstance(image, list) else [image]
    return float(np.mean([np.asarray(frame.convert("RGB"), dtype=np.float64).mean() for frame in frames]) / 255)


async def late(image, seconds: float) -> float:
    """The same after so long, as from a service elsewhere."""
    await asyncio.sleep(seconds)
    return compute_score(image)
