"""Arrays of Python objects, as DataProto carries them."""

from typing import Any

import numpy as np


def object_array(values: list[Any]) -> np.ndarray:
    """One element a value, even where the values are sequences themselves."""
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array
