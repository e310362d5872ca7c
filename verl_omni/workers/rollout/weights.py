"""Weights on their way from the training ranks to rollout engines in other processes: through Ray's object store."""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import ray
import torch

BUCKET_BYTES = 2**28


@dataclass(frozen=True)
class StoredWeights:
    """Where they lie, and what has to come out: how many tensors, and the checksum of their names and bytes."""

    buckets: list[ray.ObjectRef]
    count: int
    checksum: int


def store_in_buckets(weights: Iterable[tuple[str, torch.Tensor]], keep: bool = True) -> StoredWeights:
    """Objects of up to BUCKET_BYTES (a larger tensor is alone). `keep` false: only take part in gathering them."""
    stored, bucket, size, count, total = [], {}, 0, 0, 0
    for name, tensor in weights:
        if not keep:
            continue
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            stored.append(ray.put(bucket))
            bucket, size = {}, 0
        bucket[name] = tensor.detach().cpu().clone()
        size, count, total = size + tensor.nbytes, count + 1, total + checksum(name, bucket[name])
    return StoredWeights([*stored, ray.put(bucket)] if bucket else stored, count, total % 2**64)


def from_buckets(stored: StoredWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """One bucket in memory at a time. After the last it raises if anything was lost or changed on the way."""
    count, total = 0, 0
    for reference in stored.buckets:
        for name, tensor in ray.get(reference).items():
            count, total = count + 1, total + checksum(name, tensor)
            yield name, tensor
    if (count, total % 2**64) != (stored.count, stored.checksum):
        raise RuntimeError(
            f"{count} weights with checksum {total % 2**64:016x} arrived of {stored.count} with {stored.checksum:016x}"
        )


def checksum(name: str, tensor: torch.Tensor) -> int:
    """Of a tensor in CPU memory, as fast as it can be read."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    words = raw[: len(raw) // 8 * 8].view(torch.int64)
    return zlib.crc32(name.encode()) + int(words.sum()) + int(raw[len(words) * 8 :].sum())
