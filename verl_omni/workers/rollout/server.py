"""A rollout engine in a process of its own, with its own copy of the model: a Ray actor, on a GPU or a CPU."""

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.config import DiffusionActorConfig, DiffusionModelConfig, DiffusionRolloutConfig
from verl_omni.utils.external_lib import import_external_lib
from verl_omni.workers.engine.module import quiet_loading
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.batched import BatchedRollout
from verl_omni.workers.rollout.trajectories import ship
from verl_omni.workers.rollout.weights import StoredWeights, from_buckets


class RolloutServer(ABC):
    """Answers `generate` with weights of a known version. Trajectories leave it by reference."""

    def __init__(self, config: DictConfig):
        import_external_lib(config.actor_rollout_ref.model.external_lib)
        quiet_loading()
        self.actor_config: DiffusionActorConfig = OmegaConf.to_object(config.actor_rollout_ref.actor)
        self.model_config: DiffusionModelConfig = OmegaConf.to_object(config.actor_rollout_ref.model)
        self.config: DiffusionRolloutConfig = OmegaConf.to_object(config.actor_rollout_ref.rollout)

    async def start(self) -> None:
        """Load the model; its trained weights come with the first update."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.engine = await asyncio.to_thread(self.load, device)

    @abstractmethod
    def load(self, device: torch.device) -> BatchedRollout:
        """The engine with the model in it."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        negative_prompt_ids: list[int] | None = None,
        priority: int = 0,
    ) -> RolloutOutput:
        output = await self.engine.generate(
            prompt_ids, sampling_params, request_id, image_data, video_data, negative_prompt_ids, priority
        )
        place = sampling_params.get("place")
        return output.cpu() if place is None else await asyncio.to_thread(ship, place["key"], output)

    async def begin(self) -> None:
        """Before a rollout: forget what the one before had on the device."""
        self.engine.begin()

    async def withdraw(self, position: tuple) -> None:
        self.engine.batcher.withdraw(position)

    async def update_weights(self, stored: StoredWeights, version: int) -> None:
        """Buckets of weights in Ray's object store. Requests that run finish on the old ones and say so."""
        await asyncio.to_thread(self.engine.update_weights, from_buckets(stored), version)

    async def pause(self) -> None:
        await asyncio.to_thread(self.engine.pause)

    async def resume(self) -> None:
        self.engine.resume()

    async def stop(self) -> None:
        self.engine.stop()
