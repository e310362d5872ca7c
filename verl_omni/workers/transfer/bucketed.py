"""What our checkpoint engines for verl have in common: weights travel in buckets, each with a line about it."""

import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable

import torch
from verl.checkpoint_engine.base import CheckpointEngine, TensorMeta, merge_weight_chunks, split_weight_chunks

Chunk = tuple[TensorMeta, torch.Tensor]


class BucketedEngine(CheckpointEngine):
    """Buckets of up to `bucket_size` bytes. A tensor may be spread over several. What arrives is in CPU memory, and the
    receiver's own; other engines may use theirs again for the next bucket."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.bucket_size, self.is_master = bucket_size, is_master

    @property
    @abstractmethod
    def sends(self) -> bool:
        """Else this process only takes part in gathering the weights."""

    @abstractmethod
    def send_bucket(self, line: bytes, chunks: list[torch.Tensor]) -> None:
        """The line, and the bytes of all chunks, one after the other."""

    @abstractmethod
    def receive_bucket(self) -> tuple[bytes, torch.Tensor]:
        """(line, bytes) of the next that arrives."""

    def bucket_read(self) -> None:
        """All of the bucket that was received last has been copied."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        if not self.sends:
            for _ in weights:
                pass
            return
        bucket, size = [], 0
        whole = ((name, self.ready(tensor.detach()).contiguous()) for name, tensor in weights)
        async for meta, chunk in split_weight_chunks(whole, self.bucket_size):
            if size + meta.chunk_size > self.bucket_size:
                self._send(bucket, last=False)
                bucket, size = [], 0
            bucket.append((meta, chunk))
            size += meta.chunk_size
        self._send(bucket, last=True)

    def ready(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where it can be sent from."""
        return tensor

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        async for name, tensor in merge_weight_chunks(self._chunks(), self.bucket_size):
            yield name, tensor

    def _send(self, bucket: list[Chunk], last: bool) -> None:
        lines = [(m.name, list(m.shape), str(m.dtype).split(".")[1], m.chunk_offset, m.chunk_size) for m, _ in bucket]
        self.send_bucket(json.dumps({"last": last, "chunks": lines}).encode(), [chunk for _, chunk in bucket])

    async def _chunks(self) -> AsyncIterator[Chunk]:
        last = False
        while not last:
            line, body = self.receive_bucket()
            told, begin = json.loads(line), 0
            for name, shape, dtype, offset, size in told["chunks"]:
                meta = TensorMeta(name, torch.Size(shape), getattr(torch, dtype), offset, size, begin)
                yield meta, body[begin : begin + size].to("cpu", copy=True)  # in a bucket it may lie at any byte
                begin += size
            last = told["last"]
            self.bucket_read()
