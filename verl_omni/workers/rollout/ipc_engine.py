"""verl's checkpoint engine between processes on one device: each training rank hands weights to the server beside it.

They go through the device's own memory (CUDA IPC), on a CPU through shared memory.
"""

import contextlib
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from verl_omni.workers.rollout.bucketed_engine import BucketedEngine

DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor: which number the device has
READ = b"read"
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


@dataclass(frozen=True)
class Place:
    """Where a process is, and where others find it."""

    address: str
    machine: str
    device: str


@CheckpointEngineRegistry.register("ipc")
class IpcCheckpointEngine(BucketedEngine):
    """The bucket that both see is there during an update only."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        super().__init__(bucket_size, is_master)
        self.address: str | None = None
        self._listener: Listener | None = None
        self._sending: tuple[Connection, torch.Tensor] | None = None
        self._open = contextlib.ExitStack()

    def prepare(self) -> Place:
        if self._listener is None:
            self._folder = Path(tempfile.mkdtemp(prefix="verl-omni-", dir=IN_MEMORY))  # that nobody else may enter
            self._listener = Listener(str(self._folder / "weights"), "AF_UNIX")
            weakref.finalize(self, leave, self._listener, self._folder)
        return Place(self._listener.address, socket.gethostname(), device_name())

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Place]
    ) -> tuple[dict[str, list[str | None]], dict[str, list[str]]]:
        """Server i listens to rank i."""
        ranks, servers = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        if len(servers) > len(ranks):
            raise ValueError(f"weights by ipc: {len(servers)} rollout servers have {len(ranks)} training processes")
        for i, (rank, server) in enumerate(zip(ranks, servers, strict=False)):
            if (rank.machine, rank.device) != (server.machine, server.device):
                raise ValueError(
                    f"weights by ipc: rollout server {i} is on {server.device} of {server.machine}, training process "
                    f"{i} on {rank.device} of {rank.machine}, and they have to share one: choose gloo or nccl"
                )
        draw = [rank.address for rank in ranks[: len(servers)]]
        return {"address": [*draw, *[None] * (len(ranks) - len(draw))]}, {"address": draw}

    def init_process_group(self, address: str | None) -> None:
        self.address = address

    def finalize(self) -> None:
        """The bucket goes once the other side has let go of it."""
        self._sending = None
        self._open.close()

    @property
    def sends(self) -> bool:
        return self.address is not None

    def send_bucket(self, line: bytes, chunks: list[torch.Tensor]) -> None:
        if self._sending is None:
            connection = self._open.enter_context(self._listener.accept())
            self._sending = connection, self._offer(connection)
        (connection, bucket), begin = self._sending, 0
        for chunk in chunks:
            bucket[begin : begin + len(chunk)].copy_(chunk)
            begin += len(chunk)
        if bucket.is_cuda:
            torch.cuda.synchronize()
        connection.send_bytes(line)
        connection.recv_bytes()

    def _offer(self, connection: Connection) -> torch.Tensor:
        """A bucket, and to the other side the way to it."""
        if on_cpu():
            path = self._folder / "bucket"
            bucket = torch.from_file(str(path), shared=True, size=self.bucket_size, dtype=torch.uint8)
            self._open.callback(path.unlink)
            connection.send(str(path))
            return bucket
        bucket = torch.empty(self.bucket_size, dtype=torch.uint8, device="cuda")
        connection.send(reduce_tensor(bucket)[1])
        return bucket

    def buckets(self) -> Iterator[tuple[bytes, torch.Tensor]]:
        with Client(self.address, "AF_UNIX") as connection:
            bucket = opened(connection.recv())
            try:
                while True:
                    yield connection.recv_bytes(), bucket
                    connection.send_bytes(READ)
            finally:  # of the last one, after which nobody asks for more
                del bucket
                connection.send_bytes(READ)


def opened(told: str | tuple) -> torch.Tensor:
    if isinstance(told, str):
        return torch.from_file(told, shared=True, size=os.path.getsize(told), dtype=torch.uint8)
    arguments = list(told)
    arguments[DEVICE_ARGUMENT] = torch.cuda.current_device()
    return rebuild_cuda_tensor(*arguments)


def leave(listener: Listener, folder: Path) -> None:
    listener.close()
    shutil.rmtree(folder, ignore_errors=True)


def on_cpu() -> bool:
    return not torch.cuda.is_available()


def device_name() -> str:
    """The same in two processes that see it under different numbers."""
    return "the CPU" if on_cpu() else f"GPU {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
