"""The real trainer, worker, agent loop and rewards in one process: a run without Ray's start-up.

For tests, and for sweeps over settings, where starting a cluster takes longer than the steps that are looked at.
"""

import asyncio
import os
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig
from verl.protocol import DataProto

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.agent_loop.diffusion_agent_loop import DiffusionAgentLoopWorker, Drawn, assign
from verl_omni.config.keys import with_plus
from verl_omni.data.loading import load_datasets
from verl_omni.rewards.reward_loop import RewardLoopWorker
from verl_omni.trainer.diffusion.base_trainer import BaseRayDiffusionTrainer
from verl_omni.trainer.diffusion.direct_preference_trainer import DirectPreferenceRayTrainer
from verl_omni.trainer.diffusion.policy_gradient_trainer import PolicyGradientRayTrainer
from verl_omni.trainer.diffusion.rollouts import EmbeddedRollouts
from verl_omni.workers.diffusion_worker import DiffusionWorker

TRAINERS = {"policy_gradient": PolicyGradientRayTrainer, "direct_preference": DirectPreferenceRayTrainer}


def local_config(overrides: list[str]) -> DictConfig:
    """The configuration of a run with these overrides, checked, as the command makes it."""
    from hydra import compose, initialize_config_module

    from verl_omni.config import schema
    from verl_omni.trainer.checks.preflight import preflight
    from verl_omni.trainer.resources import choose_device

    schema.register()
    given = [f"trainer.device={choose_device(None)}", *map(with_plus, overrides)]
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        return preflight(compose("diffusion_trainer", given))


def local_trainer(config: DictConfig) -> BaseRayDiffusionTrainer:
    """The trainer that the configuration asks for, with its worker in this process, ready to `fit`."""
    train, val = load_datasets(config)
    family = TRAINERS[config.algorithm.trainer_type]
    trainer_class = type(f"Local{family.__name__}", (_LocalWorkers, family), {})
    trainer = trainer_class(config, None, {}, None, train_dataset=train, val_dataset=val)
    trainer.init_workers()
    return trainer


class _LocalWorkers:
    """For a trainer of online sampling: its worker, agent loop and reward are called directly."""

    def init_workers(self) -> None:
        self._set_schedule_length()
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        worker = DiffusionWorker(self.config)
        worker.init_model()
        self.actor_wg = _LocalGroup(worker)
        self.reward_loop_manager, self.rollouts = None, EmbeddedRollouts(self.actor_wg)
        reward = RewardLoopWorker(self.config)
        engine = SimpleNamespace(
            generate=SimpleNamespace(remote=worker.generate), withdraw=SimpleNamespace(remote=worker.withdraw)
        )
        self.agent_loop_manager = _LocalAgentLoops(
            DiffusionAgentLoopWorker(
                self.config, [engine], [SimpleNamespace(compute_score=SimpleNamespace(remote=reward.compute_score))]
            )
        )


class _LocalGroup:
    """What the trainer sees of its workers: here one. Where a group answers with a list, so does this."""

    world_size, workers = 1, [None]

    def __init__(self, worker: DiffusionWorker):
        self.worker = worker

    def update_actor(self, batch: DataProto) -> list[dict[str, float]]:
        return [self.worker.update_actor(batch)]

    def checkpoint_bytes(self) -> list[int]:
        return [self.worker.checkpoint_bytes()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


class _LocalAgentLoops:
    def __init__(self, worker: DiffusionAgentLoopWorker):
        self.worker, self.loop = worker, asyncio.new_event_loop()

    def start_images(self, batch: DataProto, images_to: dict[int, str] | None = None) -> Callable[[], Drawn]:
        """Nothing goes on beside this process: the images are drawn when they are waited for."""
        return lambda: self.generate_images(batch, images_to)

    def generate_images(self, batch: DataProto, images_to: dict[int, str] | None = None) -> Drawn:
        name = uuid.uuid4().hex
        assign(batch, 1, 1, self.worker.config.actor_rollout_ref.rollout.max_num_seqs, name)
        images = self.loop.run_until_complete(self.worker.generate_images(batch, name))
        return images, lambda: self.loop.run_until_complete(self.worker.collect_scores(name, True, images_to))
