"""Where samples are drawn: in the training workers, or by servers of their own. The trainer asks both in one way."""

from typing import Any

import ray
from omegaconf import DictConfig

from verl_omni.trainer.resources import busy_at_once, worker_environment
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


class ServerRollouts:
    """Servers with copies of the model; weights that they do not have yet are pushed to them before they draw."""

    def __init__(self, config: DictConfig, actor_wg: Any, device: str):
        self.actor_wg = actor_wg
        rollout = config.actor_rollout_ref.rollout
        per_node, nodes = rollout.n_gpus_per_node or 1, rollout.nnodes or 1
        if device == "cuda":
            check_devices(actor_wg.world_size, per_node * nodes, int(ray.cluster_resources().get("GPU", 0)))
        threads = worker_environment(device, busy_at_once(config, per_node))
        server = ray.remote(server_class(rollout.name)).options(
            num_cpus=1, num_gpus=1 if device == "cuda" else 0, runtime_env={"env_vars": threads}
        )
        self.servers = [server.remote(config) for _ in range(per_node * nodes)]
        self._loading = [s.start.remote() for s in self.servers]
        self._held: tuple[str, int] | None = None

    def begin(self, policy: str, version: int) -> None:
        ray.get(self._loading)
        ray.get([s.begin.remote() for s in self.servers])
        if self._held != (policy, version):
            stored = self.actor_wg.publish_weights(policy)[0]
            ray.get([s.update_weights.remote(stored, version) for s in self.servers])
            self._held = (policy, version)

    def end(self) -> None:
        """A server may go on with what others ask of it."""

    def places(self, ranks: list[int] | None, samples: int) -> tuple[list[int], bool]:
        return in_turn(samples, len(self.servers)), True

    def shutdown(self) -> None:
        for server in self.servers:
            ray.kill(server)


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
