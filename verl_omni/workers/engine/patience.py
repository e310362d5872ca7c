"""Where ranks wait for one that writes: a disk may take longer than what they wait for each other otherwise."""

import functools
from datetime import timedelta

import torch.distributed as dist

# Of a rank that has died the others hear at once, as its connections end.
PATIENCE = timedelta(days=1)


def writers() -> dist.ProcessGroup:
    """All ranks, for what they say to each other about what is being written: among what they say to train it would get
    lost, and run into the few minutes that are enough there."""
    return _group(dist.group.WORLD)


@functools.cache
def _group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def meet() -> None:
    """All have written what they had to: from here on they may wait for each other as ever."""
    dist.barrier(group=writers())
