"""How long a call takes on a device."""

import time
from collections.abc import Callable

import torch


def seconds(call: Callable, device: str, times: int = 20) -> float:
    """The mean of so many, after one that compiles what it needs."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    call()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return (time.perf_counter() - began) / times
