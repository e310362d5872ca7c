import ctypes
import re
from pathlib import Path

import pytest

from verl_omni.utils import free_memory

BLOCK, BLOCKS = 2**16, 1024


def resident() -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.skipif(free_memory._malloc_trim() is None, reason="a C library that gives memory back of itself")
def test_what_was_freed_is_given_back():
    """Below a block that is still used: of itself the library gives back only what is on top."""
    malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    blocks = [malloc(BLOCK) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    kept = blocks.pop()
    for block in blocks:
        free(block)
    before = resident()
    free_memory.give_back_memory()
    assert before - resident() > BLOCK * BLOCKS // 2
    free(kept)
