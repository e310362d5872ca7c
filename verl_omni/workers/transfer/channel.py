"""A process's end of one of verl's checkpoint engines, which carry weights from training ranks to rollout servers."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

import verl_omni.workers.transfer.gloo  # noqa: F401  (registers "gloo")
import verl_omni.workers.transfer.ipc  # noqa: F401  (registers "ipc")
from verl_omni.config import CheckpointEngineConfig
from verl_omni.workers.transfer.bucketed import BucketedEngine
from verl_omni.workers.transfer.weights import Name, SentWeights, Sum


class Channel:
    def __init__(self, config: CheckpointEngineConfig, is_master: bool = False):
        more = {"is_master": True} if is_master else {}
        size = config.update_weights_bucket_megabytes << 20
        self.engine: CheckpointEngine = CheckpointEngineRegistry.new(
            config.backend, bucket_size=size, **more, **config.engine_kwargs
        )
        self._received: dict[Name, list[tuple[str, torch.Tensor]]] = {}
        self._lock = threading.Lock()  # others come, in a thread of their own, while some are taken

    async def send(self, weights: Iterable[tuple[str, torch.Tensor]], name: Name, **more: Any) -> SentWeights:
        """`more` is said of them."""
        total = Sum()
        await self.engine.send_weights(total.over(weights), global_steps=name[1])
        return SentWeights(name=name, count=total.count, checksum=total.checksum, **more)

    async def receive(self, name: Name) -> None:
        """Into CPU memory, where the weights stay until they are taken. Those of the update before stay too: a server
        may be about to be told to take them."""
        own = isinstance(self.engine, BucketedEngine)
        coming = self.engine.receive_weights(global_steps=name[1])
        weights = [(key, one if own else one.to("cpu", copy=True)) async for key, one in coming]
        with self._lock:
            self._received = dict([*self._received.items()][-1:]) | {name: weights}

    def take(self, sent: SentWeights) -> Iterator[tuple[str, torch.Tensor]]:
        """They are the caller's from now on, however many others come before it reads them. What has come since stays
        for the next time."""
        with self._lock:
            if sent.name not in self._received:
                wanted, *there = (f"{policy} {version}" for policy, version in [sent.name, *self._received])
                raise RuntimeError(f"weights {wanted} are not here (any more); here are: {', '.join(there) or 'none'}")
            names = list(self._received)
            weights = self._received[sent.name]
            self._received = {name: self._received[name] for name in names[names.index(sent.name) + 1 :]}
        return _whole(weights, sent)


def _whole(weights: list[tuple[str, torch.Tensor]], sent: SentWeights) -> Iterator[tuple[str, torch.Tensor]]:
    total = Sum()
    yield from total.over(weights)
    total.check(sent.count, sent.checksum)


def backend(config: CheckpointEngineConfig) -> type[CheckpointEngine]:
    return CheckpointEngineRegistry.get(config.backend)


def turns(topology: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """What `build_topology` says to each process of a side."""
    return [dict(zip(topology, values, strict=True)) for values in zip(*topology.values(), strict=True)]
