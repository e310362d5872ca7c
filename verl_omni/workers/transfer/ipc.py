"""verl's checkpoint engine between processes on one device: each training rank hands weights to the server beside it.

They go through the device's own memory (CUDA IPC), on a CPU through shared memory.
"""

import contextlib
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from verl_omni.workers.transfer.bucketed import BucketedEngine

DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor: which number the device has
DONE = b"done"
PATIENCE = 300  # seconds until the other side has come
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


@dataclass(frozen=True)
class Place:
    """Where a process is, and where it can be found during this update."""

    address: str
    machine: str
    device: str


@CheckpointEngineRegistry.register("ipc")
class IpcCheckpointEngine(BucketedEngine):
    """Everything is opened for one update, from `prepare` to `finalize`: what has failed leaves nothing to the next."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        super().__init__(bucket_size, is_master)
        self._open = contextlib.ExitStack()
        self._address: str | None = None
        self._listening: socket.socket | None = None
        self._peer: tuple[Connection, torch.Tensor] | None = None  # and the bucket that both see

    def prepare(self) -> Place:
        self.finalize()
        folder = tempfile.mkdtemp(prefix="verl-omni-", dir=IN_MEMORY)  # that nobody else may enter
        self._open.callback(shutil.rmtree, folder, ignore_errors=True)
        return Place(os.path.join(folder, "weights"), socket.gethostname(), device_name())

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Place]
    ) -> tuple[dict[str, list], dict[str, list]]:
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
        train = [*draw, *[None] * (len(ranks) - len(draw))]
        return {"address": train, "sends": [True] * len(train)}, {"address": draw, "sends": [False] * len(draw)}

    def init_process_group(self, address: str | None, sends: bool) -> None:
        self._address = address
        if sends and address is not None:
            self._listening = self._open.enter_context(socket.socket(socket.AF_UNIX))
            self._listening.bind(address)
            self._listening.listen(1)
            self._listening.settimeout(PATIENCE)

    def finalize(self) -> None:
        self._address = self._listening = self._peer = None
        self._open.close()

    @property
    def sends(self) -> bool:
        return self._listening is not None

    def send_bucket(self, line: bytes, chunks: list[torch.Tensor]) -> None:
        if self._peer is None:
            connection = self._connection(self._listening.accept()[0])
            self._peer = connection, self._offer(connection)
        (connection, bucket), begin = self._peer, 0
        for chunk in chunks:
            bucket[begin : begin + len(chunk)].copy_(chunk)
            begin += len(chunk)
        if bucket.is_cuda:
            torch.cuda.synchronize()
        connection.send_bytes(line)
        connection.recv_bytes()

    def _offer(self, connection: Connection) -> torch.Tensor:
        """A bucket, once the other side has opened it too."""
        if not on_cpu():
            bucket = torch.empty(self.bucket_size, dtype=torch.uint8, device="cuda")
            connection.send(reduce_tensor(bucket)[1])
            connection.recv_bytes()
            return bucket
        path = Path(self._address).with_name("bucket")
        with path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, self.bucket_size)  # else the first write beyond would be a SIGBUS
            except OSError as error:
                size = f"{self.bucket_size >> 20} MiB in {path.parent} ({error.strerror})"
                raise OSError(
                    f"weights by ipc: no room for {size}: lower "
                    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
                ) from error
        bucket = mapped(str(path))
        connection.send(str(path))
        connection.recv_bytes()
        path.unlink()
        return bucket

    def receive_bucket(self) -> tuple[bytes, torch.Tensor]:
        if self._peer is None:
            calling = socket.socket(socket.AF_UNIX)
            calling.connect(self._address)
            connection = self._connection(calling)
            self._peer = connection, opened(connection.recv())
            connection.send_bytes(DONE)
        connection, bucket = self._peer
        return connection.recv_bytes(), bucket

    def bucket_read(self) -> None:
        self._peer[0].send_bytes(DONE)

    def _connection(self, own: socket.socket) -> Connection:
        own.setblocking(True)
        return self._open.enter_context(Connection(own.detach()))


def opened(told: str | tuple) -> torch.Tensor:
    if isinstance(told, str):
        return mapped(told)
    arguments = list(told)
    arguments[DEVICE_ARGUMENT] = torch.cuda.current_device()
    return rebuild_cuda_tensor(*arguments)


def mapped(path: str) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)


def on_cpu() -> bool:
    return not torch.cuda.is_available()


def device_name() -> str:
    """The same in two processes that see it under different numbers."""
    return "the CPU" if on_cpu() else f"GPU {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
