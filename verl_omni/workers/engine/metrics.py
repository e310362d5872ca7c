"""Metrics over micro-batches: means, but for names with `max`, without waiting for the device."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def and_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last. Items are made one ahead, never all at once."""
    items = iter(items)
    item = next(items)
    for following in items:
        yield item, False
        item = following
    yield item, True


def is_maximum(name: str) -> bool:
    return "max" in name


def accumulate(total: dict[str, torch.Tensor], metrics: dict[str, Any], share: float) -> None:
    """Weighted mean over micro-batches (or their maximum)."""
    for name, value in metrics.items():
        value = torch.as_tensor(value).detach().double()
        if share == 0:  # of rows that count for nothing
            value = torch.full_like(value, -math.inf if is_maximum(name) else 0.0)
        if is_maximum(name):
            total[name] = torch.maximum(total[name], value) if name in total else value
        else:
            total[name] = total.get(name, 0.0) + value * share
