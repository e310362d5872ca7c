"""How bright an image or a video is: a reward that changes as little as the picture does."""

import numpy as np


def compute_score(image) -> float:
    frames = image if isinstance(image, list) else [image]
    return float(np.mean([np.asarray(frame.convert("RGB"), dtype=np.float64).mean() for frame in frames]) / 255)
