"""Brightness, as slow as one likes: for `benchmarks.reward_overlap`."""

import time

from benchmarks.brightness import compute_score as brightness


def compute_score(images: list, seconds: float = 0.0) -> list[float]:
    """`seconds` for each image, one after the other."""
    time.sleep(seconds * len(images))
    return [brightness(image) for image in images]
