"""How bright an image is: a reward that changes as little as the image does."""

import numpy as np


def compute_score(image) -> float:
    return float(np.asarray(image.convert("RGB"), dtype=np.float64).mean() / 255)
