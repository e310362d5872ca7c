"""The real trainer, worker, agent loop and rewards in one process: a run without Ray's start-up.

For tests, and for sweeps over settings, where starting a cluster takes longer than the steps that are looked at.
"""

import asyncio
import os
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig
from verl.protocol import DataProto

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.agent_loop.manager import DiffusionAgentLoopManager, Drawn, assign
from verl_omni.agent_loop.rewriting import agent_loop_worker
from verl_omni.config.keys import with_plus
from verl_omni.data.loading import load_datasets
from verl_omni.rewards.reward_loop import RewardLoopWorker
from verl_omni.trainer.diffusion.base_trainer import BaseRayDiffusionTrainer
from verl_omni.trainer.diffusion.direct_preference_trainer import DirectPreferenceRayTrainer
from verl_omni.trainer.diffusion.policy_gradient_trainer import PolicyGradientRayTrainer
from verl_omni.trainer.diffusion.processes import listen, set_schedule_length
from verl_omni.trainer.diffusion.rollouts import EmbeddedRollouts, ServerRollouts
from verl_omni.trainer.diffusion.teaching import Teachers
from verl_omni.trainer.resources import choose_device
from verl_omni.utils.background import start, wait_for
from verl_omni.workers.diffusion_worker import DiffusionWorker
from verl_omni.workers.engine.compile.clock import clock
from verl_omni.workers.rewriting_worker import worker_class
from verl_omni.workers.rollout import server_class
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.server import RolloutServer
from verl_omni.workers.rollout.trajectories import TrajectoryStore, by_reference, large_part
from verl_omni.workers.teacher_worker import TeacherWorker

TRAINERS = {"policy_gradient": PolicyGradientRayTrainer, "direct_preference": DirectPreferenceRayTrainer}


def local_config(overrides: list[str]) -> DictConfig:
    """The configuration of a run with these overrides, checked, as the command makes it."""
    from hydra import compose, initialize_config_module

    from verl_omni.config import schema
    from verl_omni.trainer.checks.preflight import preflight

    schema.register()
    given = [f"trainer.device={choose_device(None)}", *map(with_plus, overrides)]
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        return preflight(compose("diffusion_trainer", given))


def local_trainer(config: DictConfig, judge: str | None = None) -> BaseRayDiffusionTrainer:
    """The trainer that the configuration asks for, with its worker in this process, ready to `fit`.

    `judge` is the address of the server that `reward.reward_model` asks for: who calls this has started it.
    """
    choose_device(config.trainer.device)  # verl would take a GPU's platform wherever torch was built for one
    train, val = load_datasets(config)
    family = TRAINERS[config.algorithm.trainer_type]
    trainer_class = type(f"Local{family.__name__}", (_LocalWorkers, family), {})
    trainer = trainer_class(config, None, {}, None, train_dataset=train, val_dataset=val)
    trainer.judge = judge
    trainer.init_workers()
    return trainer


class _LocalWorkers:
    """For a trainer of online sampling: its worker, agent loop, rewards and rollout servers are called directly."""

    judge: str | None

    def init_workers(self) -> None:
        config = self.run.config
        set_schedule_length(config, self.total_steps)
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        worker = worker_class(config)(config)
        worker.init_model()
        self.actor_wg, self.reward_loop_manager, self.teachers = _LocalGroup(worker), None, None
        if config.actor_rollout_ref.actor.teacher.n_gpus_per_node:
            teacher = TeacherWorker(config)
            teacher.init_model()
            for one in (worker, teacher):
                one.trajectories = _LocalTrajectories(one.trajectories.on_host)
            self.teachers = Teachers(_LocalGroup(teacher), self.actor_wg)
        if config.actor_rollout_ref.hybrid_engine:
            self.rollouts, servers = _LocalRollouts(self.actor_wg, self.layout), [_Handle(worker)]
        else:
            worker.trajectories = _LocalTrajectories(worker.trajectories.on_host)
            count = config.actor_rollout_ref.rollout.n_gpus_per_node or 1
            engine = server_class(config.actor_rollout_ref.rollout.name)
            local = type(f"Local{engine.__name__}", (_LocalServer, engine), {})
            servers = [_Handle(local(config)) for _ in range(count)]
            self.rollouts = ServerRollouts(servers, self.actor_wg, self.timeline)
            listen(config, self.rollouts)
        rewards = [_Handle(RewardLoopWorker(config, self.judge))]
        agents = _Handle(agent_loop_worker(config)(config, servers, rewards))
        self.agent_loop_manager = _LocalAgentLoops(config, servers, rewards, [agents])

    def end_drawing(self) -> None:
        self.rollouts.end()

    def changes(self) -> list[int]:
        return [self.actor_wg.worker.changes()]

    def give_up_checkpoint(self) -> None:
        self.actor_wg.worker.give_up_checkpoint()


class _LocalRollouts(EmbeddedRollouts):
    def compiling_seconds(self) -> float:
        return clock.seconds()


class _Handle:
    """An object as one calls it in another process: `handle.method.remote(...)` gives what is to be awaited."""

    def __init__(self, called: Any):
        self._called = called

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=getattr(self._called, name))


class _LocalGroup:
    """What the trainer sees of its workers: here one. Where a group answers with a list, so does this."""

    world_size, workers = 1, [None]

    def __init__(self, worker: DiffusionWorker):
        self.worker = worker

    def update_actor(self, batch: DataProto) -> list[dict[str, float]]:
        return [self.worker.update_actor(batch)]

    def checkpoint_bytes(self) -> list[int]:
        return [self.worker.checkpoint_bytes()]

    def checkpoint_written(self, wait: bool) -> list[bool]:
        return [self.worker.checkpoint_written(wait)]

    def checkpoint_files(self, path: str) -> list[dict[str, int]]:
        return [self.worker.checkpoint_files(path)]

    def publish_weights(self, policy: str, version: int) -> list[dict[str, torch.Tensor]]:
        engine = self.worker.engine
        self.worker.remember(policy, version)
        with engine.eval_mode(), engine.policy(policy):
            return [{name: tensor.detach().clone() for name, tensor in engine.get_per_tensor_param()[0]}]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


class _LocalServer(RolloutServer):
    """A rollout server in this process, before the class of its engine; weights and trajectories stay as they are."""

    async def start(self) -> None:
        # One after the other: two at once get into each other's way in one process.
        self.engine = self.engine or self.load(torch.device("cpu"))

    def generate_to_ship(self, **request: Any) -> tuple[asyncio.Future, asyncio.Future]:
        drawing = asyncio.ensure_future(self._answer(**request))

        async def part(of: Callable[[RolloutOutput], Any]) -> Any:
            return of(await drawing)

        return part(lambda output: by_reference(output, None)), asyncio.ensure_future(part(large_part))

    def unpack(self, stored: dict[str, torch.Tensor]) -> tuple[Iterable[tuple[str, torch.Tensor]], None, bool]:
        return stored.items(), None, True


class _LocalTrajectories(TrajectoryStore):
    def fetch(self, stored: list[asyncio.Future | Future]) -> list[dict[str, torch.Tensor]]:
        return [part.result() for part in stored]

    def store(self, row: dict[str, torch.Tensor]) -> Future:
        stored = Future()
        stored.set_result(row)
        return stored


class _LocalAgentLoops(DiffusionAgentLoopManager):
    def start_images(self, batch: DataProto, images_to: dict[int, str] | None = None) -> Callable[[], Drawn]:
        name, (worker,) = uuid.uuid4().hex, self.workers
        batch.meta_info["any_server"] = self.any_server
        assign(batch, self.num_servers, 1, self.max_num_seqs, name)
        drawing = start(worker.generate_images.remote(batch, name))

        def wait() -> Drawn:
            images = drawing.result()
            return images, lambda: wait_for(worker.collect_scores.remote(name, True, images_to))

        return wait
