"""Seeds of all that a run draws, made of the user's seed, what is drawn, and at which step.

Arithmetic such as `seed + step` gives two runs with neighbouring seeds the same draws, and two uses of one seed the
same stream. numpy's SeedSequence mixes all of it, for any seed that is not negative.
"""

from zlib import crc32

import numpy as np


def derive_seeds(seed: int, purpose: str, *numbers: int, count: int) -> list[int]:
    """`count` seeds of 63 bits for one purpose, at the step (and group, ...) that `numbers` name.

    The first ones do not depend on `count`.
    """
    mixed = np.random.SeedSequence(seed, spawn_key=(crc32(purpose.encode()), *numbers))
    return (mixed.generate_state(count, np.uint64) >> np.uint64(1)).tolist()


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    return derive_seeds(seed, purpose, *numbers, count=1)[0]
