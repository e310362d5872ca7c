"""Weights on their way from the training ranks to rollout engines in other processes."""

import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
import torch

BUCKET_BYTES = 2**28


@dataclass(frozen=True, kw_only=True)
class OnTheirWay:
    """What has to come out: how many tensors, and the checksum of their names and bytes. The rest is as
    `RolloutEngine.update_weights` takes it."""

    count: int
    checksum: int
    peft_config: dict[str, Any] | None = None
    base_sync_done: bool = True


@dataclass(frozen=True, kw_only=True)
class StoredWeights(OnTheirWay):
    """And where they lie."""

    buckets: list[ray.ObjectRef]


Name = tuple[str, int]  # a policy, and how many training steps its weights have seen


@dataclass(frozen=True, kw_only=True)
class SentWeights(OnTheirWay):
    """Servers have received them with a checkpoint engine."""

    name: Name


def store_in_buckets(weights: Iterable[tuple[str, torch.Tensor]], keep: bool = True, **more: Any) -> StoredWeights:
    """Objects of up to BUCKET_BYTES (a larger tensor is alone). `keep` false: only take part in gathering them. `more`
    is said of them."""
    stored, bucket, size, total = [], {}, 0, Sum()
    if not keep:
        for _ in weights:
            pass
        return StoredWeights(buckets=[], count=0, checksum=0)
    for name, tensor in total.over((name, tensor.detach().cpu().clone()) for name, tensor in weights):
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            stored.append(ray.put(bucket))
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    buckets = [*stored, ray.put(bucket)] if bucket else stored
    return StoredWeights(buckets=buckets, count=total.count, checksum=total.checksum, **more)


def from_buckets(stored: StoredWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """One bucket in memory at a time. After the last it raises if anything was lost or changed on the way."""
    total = Sum()
    for reference in stored.buckets:
        yield from total.over(ray.get(reference).items())
    total.check(stored.count, stored.checksum)


def checked(
    weights: Iterable[tuple[str, torch.Tensor]], expected: Collection[str], stranger: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, and an error where one is not expected (`stranger` says what it is) or one does not come."""
    missing = dict.fromkeys(expected)
    for name, tensor in weights:
        if name not in expected:
            raise KeyError(f"weights for {name}, which is {stranger}")
        missing.pop(name, None)
        yield name, tensor
    if missing:
        raise KeyError(f"{len(missing)} of {len(expected)} weights did not arrive, such as {next(iter(missing))}")


class Sum:
    """Counts weights that pass by."""

    def __init__(self) -> None:
        self.count, self._total = 0, 0

    @property
    def checksum(self) -> int:
        return self._total % 2**64

    def over(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.count, self._total = self.count + 1, self._total + checksum(name, tensor.detach())
            yield name, tensor

    def check(self, count: int, wanted: int) -> None:
        if (self.count, self.checksum) != (count, wanted):
            raise RuntimeError(
                f"{self.count} weights with checksum {self.checksum:016x} arrived of {count} with {wanted:016x}"
            )


def checksum(name: str, tensor: torch.Tensor) -> int:
    """Where the tensor is, as fast as it can be read there."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:  # part of another one, where no word begins
        raw = raw.clone()
    words = raw[: len(raw) // 8 * 8].view(torch.int64)
    return zlib.crc32(name.encode()) + int(words.sum()) + int(raw[len(words) * 8 :].sum())
