"""A rollout engine in a process of its own, with its own copy of the model: a Ray actor, on a GPU or a CPU."""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.config import DiffusionActorConfig, DiffusionModelConfig, DiffusionRolloutConfig
from verl_omni.utils.errors import QueueFull
from verl_omni.utils.external_lib import import_external_lib
from verl_omni.workers.engine.compile.clock import clock
from verl_omni.workers.engine.module import quiet_loading
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.batched import BatchedRollout
from verl_omni.workers.rollout.trajectories import in_two_parts
from verl_omni.workers.rollout.under_way import UnderWay
from verl_omni.workers.transfer.weights import Name, SentWeights, StoredWeights, from_buckets

if TYPE_CHECKING:
    from verl_omni.workers.rollout.image_http import ImageHttp
    from verl_omni.workers.transfer.channel import Channel


# That may wait at a server; whoever comes then is refused.
WAITING_BATCHES = 8


class RolloutServer(ABC):
    """Answers `generate` with weights of a known version. A server that Ray has started again waits for its weights."""

    def __init__(self, config: DictConfig):
        arr = config.actor_rollout_ref
        import_external_lib(arr.model.external_lib)
        self.set_up(*(OmegaConf.to_object(part) for part in (arr.actor, arr.model, arr.rollout)))

    def set_up(self, actor: DiffusionActorConfig, model: DiffusionModelConfig, rollout: DiffusionRolloutConfig) -> None:
        quiet_loading()
        self.actor_config, self.model_config, self.config = actor, model, rollout
        self.engine: BatchedRollout | None = None
        self._starting, self._has_weights = asyncio.Lock(), asyncio.Event()
        self._in_disorder = was_started_again()
        self._under_way = UnderWay()
        self._http: ImageHttp | None = None

    async def start(self) -> None:
        """Load the model, once; its trained weights come with the first update."""
        async with self._starting:
            self.engine = self.engine or await asyncio.to_thread(self.load, device())

    async def listen(self, port: int) -> str:
        """Answer people over HTTP too, as `rollout.http` says, on this port (0: a free one); the address."""
        from verl_omni.workers.rollout.image_http import ImageHttp

        http = ImageHttp(self.config, self.model_config, self._draw_for_guest, self._version)
        address = await http.start(port)
        self._http = http
        return address

    async def _draw_for_guest(self, **request: Any) -> RolloutOutput:
        return (await self.engine.generate(**request)).cpu()

    def _version(self) -> int | None:
        """Of the weights; None as long as they have not come."""
        return self.engine.version if self._has_weights.is_set() else None

    async def life(self) -> None:
        """Never answers: who waits for it learns when this process has ended."""
        await asyncio.Event().wait()

    @abstractmethod
    def load(self, device: torch.device) -> BatchedRollout:
        """The engine with the model in it."""

    async def generate(self, **request: Any) -> RolloutOutput:
        """As the engine does (`RolloutEngine.generate`), unless `abort` comes first."""
        return (await self._answer(**request)).cpu()

    @ray.method(num_returns=2)
    async def generate_to_ship(self, **request: Any) -> tuple[RolloutOutput, dict[str, torch.Tensor]]:
        """For a rank to train on: (the answer, what training needs of it)."""
        answer = await self._answer(**request)
        return await asyncio.to_thread(in_two_parts, answer)

    async def _answer(self, **request: Any) -> RolloutOutput:
        params = request["sampling_params"]
        return await self._under_way.answer(request["request_id"], self._draw(**request), lambda: self._gone(params))

    def _gone(self, sampling_params: dict[str, Any]) -> None:
        if self.engine is not None:
            self.engine.give_back(sampling_params)

    async def _draw(self, *, sampling_params: dict[str, Any], **request: Any) -> RolloutOutput:
        await self._has_weights.wait()
        self.check_room(sampling_params)
        if self._in_disorder:  # the burst was answered in part before this process began: its blocks never fill
            sampling_params = sampling_params | {"position": None}
        return await self.engine.generate(sampling_params=sampling_params, **request)

    def check_room(self, sampling_params: dict[str, Any]) -> None:
        """Who says a place among others, as a run does, is one of so many that it knows of."""
        most = WAITING_BATCHES * self.config.max_num_seqs
        if sampling_params.get("position") is None and self.engine.batcher.waiting >= most:
            raise QueueFull(f"{most} requests wait already at this rollout server: ask again later")

    async def abort(self, request_id: str) -> bool:
        """Its `generate` raises `RequestAborted` now. Whether there was such a request."""
        return self._under_way.abort(request_id)

    async def compiling_seconds(self) -> float:
        """That this process has waited for a compiler since it began."""
        return clock.seconds()

    async def begin(self) -> None:
        """Before a rollout: forget what the one before had on the device."""
        await self.start()
        self._in_disorder = False
        await asyncio.to_thread(self.engine.begin)

    async def withdraw(self, position: tuple) -> None:
        if self.engine is not None and not self._in_disorder:
            self.engine.batcher.withdraw(position)

    async def update_weights(self, stored: StoredWeights | SentWeights, version: int) -> None:
        """Weights that were stored or received. Requests that run finish on the old ones and say so."""
        weights, peft_config, base_sync_done = self.unpack(stored)  # at once: later ones may come while this one waits
        await self.start()
        await asyncio.to_thread(self.engine.update_weights, weights, version, peft_config, base_sync_done)
        if peft_config is None or base_sync_done:
            self._has_weights.set()

    def unpack(
        self, stored: StoredWeights | SentWeights
    ) -> tuple[Iterable[tuple[str, torch.Tensor]], dict[str, Any] | None, bool]:
        """(weights, peft_config, base_sync_done), as the engine takes them."""
        weights = from_buckets(stored) if isinstance(stored, StoredWeights) else self.channel.take(stored)
        return weights, stored.peft_config, stored.base_sync_done

    async def execute_checkpoint_engine(self, method: str, **kwargs: Any) -> Any:
        return await asyncio.to_thread(getattr(self.channel.engine, method), **kwargs)

    async def receive_weights(self, name: Name) -> None:
        """For `update_weights` to take, while requests go on. A thread of its own: the engine waits for others."""
        await asyncio.to_thread(asyncio.run, self.channel.receive(name))

    @functools.cached_property
    def channel(self) -> "Channel":
        from verl_omni.workers.transfer.channel import Channel

        return Channel(self.config.checkpoint_engine)

    async def pause(self) -> None:
        self.engine.hold("pause")
        await asyncio.to_thread(self.engine.drain)

    async def resume(self) -> None:
        self.engine.resume()

    async def stop(self) -> None:
        self.engine.stop()
        if self._http is not None:
            await self._http.stop()


def was_started_again() -> bool:
    """Whether this process is an actor that has died before."""
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return False
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
