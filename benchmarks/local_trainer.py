"""The real trainer, worker, agent loop and rewards in one process: a step without Ray's start-up.

For sweeps over settings, where starting a cluster for each would take longer than the step that is measured.
"""

import asyncio
import os
import socket
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig
from verl.protocol import DataProto

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.agent_loop.diffusion_agent_loop import DiffusionAgentLoopWorker, assign
from verl_omni.reward_loop.reward_loop import RewardLoopWorker
from verl_omni.trainer.diffusion.policy_gradient_trainer import PolicyGradientRayTrainer
from verl_omni.trainer.diffusion.rollouts import EmbeddedRollouts
from verl_omni.trainer.main_diffusion import load_datasets
from verl_omni.workers.diffusion_worker import DiffusionWorker


class LocalGroup:
    """What the trainer sees of its workers: here one, called directly."""

    world_size, workers = 1, [None]

    def __init__(self, worker: DiffusionWorker):
        self.worker = worker

    def update_actor(self, batch: DataProto) -> list[dict[str, float]]:
        return [self.worker.update_actor(batch)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


class LocalAgentLoops:
    def __init__(self, worker: DiffusionAgentLoopWorker):
        self.worker, self.loop = worker, asyncio.new_event_loop()

    def generate_images(
        self, batch: DataProto, images_to: dict[int, str] | None = None
    ) -> tuple[DataProto, Callable[[], DataProto]]:
        name = uuid.uuid4().hex
        assign(batch, 1, 1, self.worker.config.actor_rollout_ref.rollout.max_num_seqs, name)
        images = self.loop.run_until_complete(self.worker.generate_images(batch, name))
        return images, lambda: self.loop.run_until_complete(self.worker.collect_scores(name, True, images_to))


class LocalTrainer(PolicyGradientRayTrainer):
    def __init__(self, config: DictConfig):
        train, _ = load_datasets(config)
        super().__init__(config, None, {}, None, train_dataset=train)

    def init_workers(self) -> None:
        self._set_schedule_length()
        with socket.socket() as free:
            free.bind(("", 0))
            port = str(free.getsockname()[1])
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        worker = DiffusionWorker(self.config)
        worker.init_model()
        self.actor_wg = LocalGroup(worker)
        self.reward_loop_manager, self.rollouts = None, EmbeddedRollouts(self.actor_wg)
        reward = RewardLoopWorker(self.config)
        self.agent_loop_manager = LocalAgentLoops(
            DiffusionAgentLoopWorker(
                self.config,
                [SimpleNamespace(generate=SimpleNamespace(remote=worker.generate))],
                [SimpleNamespace(compute_score=SimpleNamespace(remote=reward.compute_score))],
            )
        )
