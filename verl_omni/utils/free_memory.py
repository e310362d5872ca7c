"""Memory that a process no longer uses, for others."""

import ctypes
import functools
from collections.abc import Callable


def give_back_memory() -> None:
    """glibc keeps what was freed, for the next one who asks. Other systems' libraries give it back of themselves."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
