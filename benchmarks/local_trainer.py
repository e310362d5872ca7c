"""The real trainer, worker, agent loop and rewards in one process: a step without Ray's start-up.

For sweeps over settings, where starting a cluster for each would take longer than the step that is measured.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig
from verl.protocol import DataProto

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.agent_loop.diffusion_agent_loop import DiffusionAgentLoopWorker, assign
from verl_omni.reward_loop.reward_loop import RewardLoopWorker
from verl_omni.trainer.diffusion.policy_gradient_trainer import PolicyGradientRayTrainer
from verl_omni.trainer.main_diffusion import load_datasets
from verl_omni.workers.diffusion_worker import DiffusionWorker


class LocalGroup:
    """What the trainer sees of its workers: here one, called directly."""

    world_size = 1

    def __init__(self, worker: DiffusionWorker):
        self.worker = worker

    def update_actor(self, batch: DataProto) -> list[dict[str, float]]:
        return [self.worker.update_actor(batch)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


class LocalAgentLoops:
    def __init__(self, worker: DiffusionAgentLoopWorker):
        self.worker, self.loop = worker, asyncio.new_event_loop()

    def generate_images(self, batch: DataProto) -> tuple[DataProto, Callable[[], DataProto]]:
        assign(batch, 1, 1, self.worker.config.actor_rollout_ref.rollout.max_num_seqs)
        images = self.loop.run_until_complete(self.worker.generate_images(batch))
        return images, lambda: self.loop.run_until_complete(self.worker.collect_scores(scores_only=True))


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
        self.reward_loop_manager = None
        reward = RewardLoopWorker(self.config)
        self.agent_loop_manager = LocalAgentLoops(
            DiffusionAgentLoopWorker(
                self.config,
                [SimpleNamespace(generate=SimpleNamespace(remote=worker.generate))],
                [SimpleNamespace(compute_score=SimpleNamespace(remote=reward.compute_score))],
            )
        )
