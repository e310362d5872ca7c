"""Where samples are drawn: in the training workers, or by servers of their own. The trainer asks both in one way."""

import asyncio
from time import perf_counter
from typing import Any, NamedTuple

import ray
from omegaconf import DictConfig

from verl_omni.report.timeline import Timeline
from verl_omni.trainer.resources import busy_at_once, worker_environment
from verl_omni.utils.background import wait_for
from verl_omni.workers.rollout import server_class


class EmbeddedRollouts:
    """The engine of each training worker, on the weights that are trained.

    A sample whose rank is known beforehand is drawn by the rank that will train on it, and its trajectory stays there.
    """

    def __init__(self, actor_wg: Any):
        self.actor_wg = actor_wg
        self.servers = actor_wg.workers

    def begin(self, policy: str, version: int) -> None:
        self.actor_wg.start_rollout(policy, version)

    def end(self) -> None:
        self.actor_wg.stop_rollout()

    def places(self, ranks: list[int] | None, samples: int) -> tuple[list[int], bool]:
        """(the server of each sample, whether trajectories have to travel); `ranks` are those that will train."""
        if ranks is not None:
            return ranks, False
        return in_turn(samples, len(self.servers)), len(self.servers) > 1

    def shutdown(self) -> None:
        """They end with their workers."""


class Weights(NamedTuple):
    """The trained weights of a policy as they were after `version` training steps, where any process can fetch them."""

    policy: str
    version: int
    stored: Any


class ServerRollouts:
    """Servers with copies of the model; weights that they do not have yet are pushed to them before they draw."""

    def __init__(self, servers: list[Any], actor_wg: Any, timeline: Timeline):
        self.servers, self.actor_wg, self.timeline = servers, actor_wg, timeline
        self._loading = dict(enumerate(server.start.remote() for server in servers))
        self._held: dict[int, tuple[str, int]] = {}

    def begin(self, policy: str, version: int) -> None:
        """All servers at once: none of them draws now."""
        held = self.all_hold(policy, version)
        weights = Weights(policy, version, None) if held else self.publish(policy, version)

        async def ready() -> None:
            await asyncio.gather(*(self.ready(server, weights) for server in range(len(self.servers))))

        wait_for(ready())

    def all_hold(self, policy: str, version: int) -> bool:
        return all(self._held.get(server) == (policy, version) for server in range(len(self.servers)))

    def publish(self, policy: str, version: int) -> Weights:
        """What the training workers hold now. It lies in Ray's object store as long as somebody keeps the answer."""
        return Weights(policy, version, self.actor_wg.publish_weights(policy)[0])

    async def ready(self, server: int, weights: Weights) -> None:
        """One server that draws nothing now is to draw with these weights."""
        if server in self._loading:
            await self._loading.pop(server)
        await self.servers[server].begin.remote()
        name = (weights.policy, weights.version)
        if self._held.get(server) != name:
            start = perf_counter()
            await self.servers[server].update_weights.remote(weights.stored, weights.version)
            self._held[server] = name
            self.timeline.add(f"rollout {server}", "weights", start, perf_counter())

    def end(self) -> None:
        """A server may go on with what others ask of it."""

    def places(self, ranks: list[int] | None, samples: int) -> tuple[list[int], bool]:
        return in_turn(samples, len(self.servers)), True

    def shutdown(self) -> None:
        for server in self.servers:
            ray.kill(server)


def start_servers(config: DictConfig, training: int, device: str) -> list[Any]:
    """A process for each rollout server, beside `training` devices that train."""
    rollout = config.actor_rollout_ref.rollout
    per_node, nodes = rollout.n_gpus_per_node or 1, rollout.nnodes or 1
    if device == "cuda":
        check_devices(training, per_node * nodes, int(ray.cluster_resources().get("GPU", 0)))
    threads = worker_environment(device, busy_at_once(config, per_node))
    server = ray.remote(server_class(rollout.name)).options(
        num_cpus=1, num_gpus=1 if device == "cuda" else 0, runtime_env={"env_vars": threads}
    )
    return [server.remote(config) for _ in range(per_node * nodes)]


def check_devices(training: int, rollout: int, there: int) -> None:
    """Ray would wait for a GPU that never comes."""
    if training + rollout > there:
        raise ValueError(
            f"actor_rollout_ref.hybrid_engine=false: training has {training} GPUs and the rollout servers need "
            f"{rollout} more, but Ray has {there} in all: add GPUs, lower trainer.n_gpus_per_node or "
            "actor_rollout_ref.rollout.n_gpus_per_node, or leave hybrid_engine true"
        )


def in_turn(samples: int, servers: int) -> list[int]:
    """Equal blocks of consecutive samples: those of one prompt meet in one server."""
    return [i * servers // samples for i in range(samples)]
