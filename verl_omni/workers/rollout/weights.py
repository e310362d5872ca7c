"""Weights on their way from the training ranks to rollout engines in other processes: through Ray's object store."""

from collections.abc import Iterable, Iterator

import ray
import torch

BUCKET_BYTES = 2**28


def store_in_buckets(weights: Iterable[tuple[str, torch.Tensor]], keep: bool = True) -> list[ray.ObjectRef]:
    """Objects of up to BUCKET_BYTES (a larger tensor is alone). `keep` false: only take part in gathering them."""
    stored, bucket, size = [], {}, 0
    for name, tensor in weights:
        if not keep:
            continue
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            stored.append(ray.put(bucket))
            bucket, size = {}, 0
        bucket[name] = tensor.detach().cpu().clone()
        size += tensor.nbytes
    return [*stored, ray.put(bucket)] if bucket else stored


def from_buckets(stored: list[ray.ObjectRef]) -> Iterator[tuple[str, torch.Tensor]]:
    """One bucket in memory at a time."""
    for reference in stored:
        yield from ray.get(reference).items()
