"""verl's checkpoint engine on gloo: from the first training rank to all rollout servers at once, through CPU memory."""

import socket
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from verl_omni.workers.transfer.bucketed import BucketedEngine


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(BucketedEngine):
    """The group of processes is made once, at the first update."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        super().__init__(bucket_size, is_master)
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

    @property
    def sends(self) -> bool:
        return self.rank >= 0

    def ready(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def send_bucket(self, line: bytes, chunks: list[torch.Tensor]) -> None:
        header = torch.frombuffer(bytearray(line), dtype=torch.uint8)
        body = torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.uint8)
        self._broadcast(torch.tensor([len(header), len(body)]))
        self._broadcast(header)
        self._broadcast(body)

    def receive_bucket(self) -> tuple[bytes, torch.Tensor]:
        lengths = self._broadcast(torch.empty(2, dtype=torch.int64)).tolist()
        header, body = (self._broadcast(torch.empty(length, dtype=torch.uint8)) for length in lengths)
        return header.numpy().tobytes(), body

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            self._group.broadcast(tensor, 0).wait()
        return tensor
