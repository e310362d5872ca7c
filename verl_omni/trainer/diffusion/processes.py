"""The processes of a run, started and ended: workers that hold the model, rollout servers, rewards, agent loops."""

import contextlib
from dataclasses import dataclass
from typing import Any

import ray
from omegaconf import DictConfig
from ray.exceptions import ActorUnavailableError
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.base import get_master_addr_port
from verl.trainer.ppo.utils import Role

from verl_omni.agent_loop.manager import DiffusionAgentLoopManager
from verl_omni.report.timeline import Timeline
from verl_omni.rewards.reward_loop import RewardLoopManager
from verl_omni.trainer.diffusion.rollouts import EmbeddedRollouts, ServerRollouts, by_checkpoint_engine, start_servers
from verl_omni.trainer.diffusion.teaching import Teachers
from verl_omni.trainer.failures import know
from verl_omni.trainer.placement import SERVERS, TEACHERS, Placement
from verl_omni.trainer.resources import busy_at_once, rendezvous_ports, worker_environment
from verl_omni.workers.layout import Layout
from verl_omni.workers.teacher_worker import TeacherWorker

WorkerClasses = dict[Role, type[Worker]]


def start_workers(
    config: DictConfig, device: str, classes: WorkerClasses, pools: Placement, group: type[RayWorkerGroup]
) -> RayWorkerGroup:
    """Those that hold the model; they have not loaded it yet."""
    pools.create_resource_pool()
    workers = group(
        resource_pool=pools.get_resource_pool(Role.ActorRollout),
        ray_cls_with_init=RayClassWithInitArgs(classes[Role.ActorRollout], config=config),
        device_name=device,
        worker_env=worker_environment(device, busy_at_once(config, config.trainer.n_gpus_per_node), config.ray.address),
        master_port_range=rendezvous_ports(),
    )
    know("model worker", workers.workers)
    return workers


def start_teachers(
    config: DictConfig, device: str, pools: Placement, group: type[RayWorkerGroup], training: RayWorkerGroup
) -> Teachers | None:
    """Those that hold teachers and nothing else, where such are asked for; they have not loaded them yet."""
    count = config.actor_rollout_ref.actor.teacher.n_gpus_per_node
    if count is None or config.trainer.val_only:
        return None
    workers = group(
        resource_pool=pools.resource_pool_dict[TEACHERS],
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(TeacherWorker), config=config),
        device_name=device,
        worker_env=worker_environment(device, busy_at_once(config, count), config.ray.address),
        master_port_range=rendezvous_ports(),
    )
    know("teacher", workers.workers)
    return Teachers(workers, training)


class Ranks(RayWorkerGroup):
    """verl's, which does not wait for a process that looks for a port where the first rank will be, if that is here.

    verl takes an address and a port as arguments too, and forgets them before it looks (0.9.1).
    """

    def _get_master_addr_port(self, pg: Any, bundle_index: int = 0, master_port_range: list[int] | None = None) -> None:
        if only_machine():
            self._master_addr, self._master_port = get_master_addr_port._function(master_port_range)
        super()._get_master_addr_port(pg, bundle_index, master_port_range)


def only_machine() -> bool:
    """Whether Ray has no other."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [node["NodeManagerAddress"] for node in nodes] == [ray.util.get_node_ip_address()]


@dataclass
class Drawing:
    """What online sampling needs beside the workers: who draws, who scores, and who asks both."""

    rollouts: EmbeddedRollouts | ServerRollouts
    rewards: RewardLoopManager
    agents: DiffusionAgentLoopManager


def start_drawing(
    config: DictConfig, device: str, pools: Placement, workers: RayWorkerGroup, layout: Layout, timeline: Timeline
) -> Drawing:
    """Their processes start up while the workers load the model."""
    rollouts = (
        EmbeddedRollouts(workers, layout, config.actor_rollout_ref.rollout.share_samples)
        if config.actor_rollout_ref.hybrid_engine
        else _server_rollouts(config, device, pools, workers, timeline)
    )
    rewards = RewardLoopManager(config, pools.options)
    agents = DiffusionAgentLoopManager(config, rollouts.servers, rewards.reward_loop_worker_handles)
    know("reward process", rewards.reward_loop_workers)
    know("agent process", agents.workers)
    return Drawing(rollouts, rewards, agents)


def _server_rollouts(
    config: DictConfig, device: str, pools: Placement, workers: RayWorkerGroup, timeline: Timeline
) -> ServerRollouts:
    servers = start_servers(config, device, pools.options(SERVERS))
    know("rollout server", servers)
    engine = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    send = by_checkpoint_engine(config, workers.workers, servers) if engine else None
    rollouts = ServerRollouts(servers, workers, timeline, send)
    rollouts.watch()
    return rollouts


def listen(config: DictConfig, rollouts: EmbeddedRollouts | ServerRollouts) -> None:
    """Let people look at the policy, where that is asked for. A port that is taken is told before models load."""
    port = config.actor_rollout_ref.rollout.http.port
    if port is not None:
        rollouts.listen(port)


def load_models(
    training: Any, rollouts: EmbeddedRollouts | ServerRollouts | None, teachers: Teachers | None = None
) -> None:
    """In all processes at once. A rollout server that cannot start is told before training has loaded."""
    groups = [training] if teachers is None else [training, teachers.workers]
    servers = [] if rollouts is None else rollouts.loading()
    waiting = [*(loading for group in groups for loading in group.execute_all_async("init_model")), *servers]
    while waiting:
        (done,), waiting = ray.wait(waiting)
        with contextlib.suppress(ActorUnavailableError) if done in servers else contextlib.nullcontext():
            ray.get(done)  # a server that has died loads again


def set_schedule_length(config: DictConfig, total_steps: int) -> None:
    """The learning-rate schedule counts optimizer steps."""
    actor, data = config.actor_rollout_ref.actor, config.data
    if actor.optim.total_training_steps is None:
        per_step = data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
        actor.optim.total_training_steps = max(1, total_steps * per_step)  # none to train: val_only
