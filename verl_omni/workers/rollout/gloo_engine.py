"""verl's checkpoint engine on gloo: from the first training rank to all rollout servers at once, through CPU memory."""

import json
import socket
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

Chunk = tuple[TensorMeta, torch.Tensor]


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """Buckets of `bucket_size` bytes. The group of processes is made once, at the first update."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.bucket_size, self.is_master = bucket_size, is_master
        self.rank: int | None = None
        self._store = self._group = None

    def prepare(self) -> tuple[str, int] | None:
        """Where the others find the sender. It listens at one address only, where torch's own store would at all."""
        if not self.is_master:
            return None
        if self._store is None:
            listener = socket.create_server((ray.util.get_node_ip_address(), 0))
            self._address = listener.getsockname()[:2]
            self._store = dist.TCPStore(
                *self._address, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        return self._address

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        ranks = [0, *[-1] * (actor_wg_world_size - 1)], list(range(1, rollout_world_size + 1))
        shared = {"world_size": rollout_world_size + 1, "master": metadata[0]}
        train, draw = ({"rank": own} | {k: [v] * len(own) for k, v in shared.items()} for own in ranks)
        return train, draw

    def init_process_group(self, rank: int, world_size: int, master: tuple[str, int]) -> None:
        """Rank -1 only takes part in gathering the weights."""
        self.rank = rank
        if rank < 0 or self._group is not None:
            return
        store = self._store or dist.TCPStore(*master, is_master=False, wait_for_workers=False)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=ray.util.get_node_ip_address())]
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, options)

    def finalize(self) -> None:
        """The group stays for the next update."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        if self.rank < 0:
            for _ in weights:
                pass
            return
        bucket, size = [], 0
        on_cpu = ((name, tensor.detach().cpu().contiguous()) for name, tensor in weights)
        async for meta, chunk in split_weight_chunks(on_cpu, self.bucket_size):
            if size + meta.chunk_size > self.bucket_size:
                self._send(bucket, last=False)
                bucket, size = [], 0
            bucket.append((meta, chunk))
            size += meta.chunk_size
        self._send(bucket, last=True)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        async for name, tensor in merge_weight_chunks(self._chunks(), self.bucket_size):
            yield name, tensor

    def _send(self, bucket: list[Chunk], last: bool) -> None:
        lines = [(m.name, list(m.shape), str(m.dtype).split(".")[1], m.chunk_offset, m.chunk_size) for m, _ in bucket]
        header = torch.frombuffer(bytearray(json.dumps({"last": last, "chunks": lines}).encode()), dtype=torch.uint8)
        body = torch.cat([chunk for _, chunk in bucket]) if bucket else torch.empty(0, dtype=torch.uint8)
        self._broadcast(torch.tensor([len(header), len(body)]))
        self._broadcast(header)
        self._broadcast(body)

    async def _chunks(self) -> AsyncIterator[Chunk]:
        last = False
        while not last:
            lengths = self._broadcast(torch.empty(2, dtype=torch.int64)).tolist()
            header, body = (self._broadcast(torch.empty(length, dtype=torch.uint8)) for length in lengths)
            told, begin = json.loads(header.numpy().tobytes()), 0
            for name, shape, dtype, offset, size in told["chunks"]:
                meta = TensorMeta(name, torch.Size(shape), getattr(torch, dtype), offset, size, begin)
                yield meta, body[begin : begin + size].clone()  # in a bucket it may lie at any byte
                begin += size
            last = told["last"]

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            self._group.broadcast(tensor, 0).wait()
        return tensor
