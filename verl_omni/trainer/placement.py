"""Where the processes of a run get their devices: one count of all of them, and a resource pool for each kind."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager
from verl.trainer.ppo.utils import Role

from verl_omni.rewards.choice import read_choices
from verl_omni.rewards.judge import JUDGE
from verl_omni.rewards.pool import scorer_pool

TRAINING, SERVERS, TEACHERS = "training", "rollout servers", "teachers"
# verl's own number of processes that may share a training GPU: each is told a part of it, and the pool holds it whole.
COLOCATED = 3


@dataclass(frozen=True)
class Wanted:
    """Processes of one kind: so many together on one node, on another the next, each with so many GPUs and CPUs."""

    name: str
    setting: str  # to lower where there is no room
    on_nodes: tuple[int, ...]
    gpus: float
    cpus: float = 0
    apart: bool = False  # no two of `on_nodes` are the same node

    def __str__(self) -> str:
        apart = self.apart and len(self.on_nodes) > 1
        count = f"{self.on_nodes[0]} on each of {len(self.on_nodes)} nodes" if apart else sum(self.on_nodes)
        return f"{self.name} {count} ({_amount(self.gpus, self.cpus)} each; {self.setting})"


@dataclass(frozen=True)
class Room:
    """What a node has to give. Its GPUs one by one: two halves of different GPUs are no whole one."""

    gpus: tuple[float, ...]
    cpus: float

    @classmethod
    def of(cls, resources: Mapping[str, float]) -> "Room":
        whole, part = divmod(resources.get("GPU", 0.0), 1)
        return cls((1.0,) * int(whole) + ((part,) if part else ()), resources.get("CPU", 0.0))

    def without(self, wanted: Wanted, processes: int) -> "Room | None":
        """What is left beside so many of these processes; None: they do not fit."""
        gpus, cpus = sorted(self.gpus), self.cpus - processes * wanted.cpus
        for _ in range(processes):
            for _ in range(max(1, int(wanted.gpus)) if wanted.gpus else 0):
                part = min(wanted.gpus, 1.0)
                fullest = next((i for i, free in enumerate(gpus) if free > part - 1e-6), None)
                if fullest is None:
                    return None
                gpus[fullest] -= part
            gpus.sort()
        return Room(tuple(gpus), cpus) if cpus > -1e-6 else None

    def __str__(self) -> str:
        return _amount(sum(self.gpus), self.cpus)


def all_wanted(config: DictConfig) -> list[Wanted]:
    """Everything that a run places."""
    trainer, rollout, judge = config.trainer, config.actor_rollout_ref.rollout, config.reward.reward_model
    teacher = config.actor_rollout_ref.actor.teacher
    gpu = 1 if config.trainer.device == "cuda" else 0
    found = [
        Wanted(
            TRAINING,
            "trainer.n_gpus_per_node",
            (trainer.n_gpus_per_node,) * trainer.nnodes,
            gpu,
            COLOCATED if gpu else 1,
            apart=True,
        )
    ]
    if config.algorithm.sample_source != "online":
        return found
    if not config.actor_rollout_ref.hybrid_engine:
        servers = (rollout.n_gpus_per_node or 1,) * (rollout.nnodes or 1)
        found.append(Wanted(SERVERS, "rollout.n_gpus_per_node", servers, gpu, 1, apart=True))
    if teacher.n_gpus_per_node and not trainer.val_only:
        each = (teacher.n_gpus_per_node,) * (teacher.nnodes or 1)
        found.append(Wanted(TEACHERS, "actor.teacher.n_gpus_per_node", each, gpu, 1, apart=True))
    if judge.enable:
        gpus = judge.n_gpus_per_node if judge.enable_resource_pool else 0
        found.append(Wanted(JUDGE, "reward.reward_model.n_gpus_per_node", (1,) * judge.nnodes, gpus))
    scorers = config.reward.scorers
    choices = read_choices(OmegaConf.to_container(scorers, resolve=True) if scorers else None)
    for label, choice in choices.items():
        if choice.processes:
            found.append(Wanted(scorer_pool(label), "reward.scorers", (1,) * choice.processes, choice.gpus))
    return found


def plan(wanted: Iterable[Wanted], nodes: Mapping[str, Room]) -> dict[str, list[str]] | None:
    """Name -> the node of each of its groups; None: they do not fit. The largest first, each where least is left."""
    left, homes = dict(nodes), {one.name: [] for one in wanted}
    for one in sorted(wanted, key=lambda one: (one.on_nodes[0] * one.gpus, one.on_nodes[0] * one.cpus), reverse=True):
        for processes in one.on_nodes:
            fits = {
                node: room
                for node in left
                if not (one.apart and node in homes[one.name])
                and (room := left[node].without(one, processes)) is not None
            }
            if not fits:
                return None
            node = min(fits, key=lambda node: (sum(fits[node].gpus), fits[node].cpus))
            left[node] = fits[node]
            homes[one.name].append(node)
    return homes


class Placement(ResourcePoolManager):
    """verl's manager of resource pools, for all that a run places. A process without devices is Ray's to place."""

    def __init__(self, wanted: list[Wanted], mapping: dict[Role, str], seconds: float):
        held = [one for one in wanted if one.gpus or one.cpus]
        super().__init__({one.name: list(one.on_nodes) for one in held}, mapping)
        self.wanted, self.held, self.seconds = wanted, held, seconds

    def create_resource_pool(self) -> None:
        """All pools, or one line that names them: at once where they can never be, else after `seconds`."""
        free, there = _rooms(ray._private.state.available_resources_per_node()), _rooms(_nodes())
        homes = plan(self.held, free)
        if homes is None:
            homes = plan(self.held, there)
            if homes is None:
                raise ValueError(f"{self._asked()}, and Ray has {_listed(there)}: ask for less, or add devices")
            print(f"Waiting for devices that others hold, {self.seconds:g} s at most.", flush=True)
        groups = {one.name: _groups(one, homes[one.name]) for one in self.held}
        if not self._wait([group for placed in groups.values() for group in placed]):
            for group in (group for placed in groups.values() for group in placed):
                remove_placement_group(group)
            raise ValueError(
                f"{self._asked()}; Ray has {_listed(there)}, but others hold some of it and did not give it back "
                f"within ray.placement_timeout={self.seconds:g} s: wait for them, or ask for less"
            )
        for one in self.held:
            self._check_apart(one, groups[one.name])
            self.resource_pool_dict[one.name] = pool = RayResourcePool(
                list(one.on_nodes),
                use_gpu=one.gpus > 0,
                max_colocate_count=max(1, int(one.cpus)),
                name_prefix=one.name,
            )
            pool.pgs = groups[one.name]

    def options(self, name: str) -> list[dict[str, Any]]:
        """For each process of a kind, what Ray has to know of its place."""
        (one,) = (one for one in self.wanted if one.name == name)
        if name not in self.resource_pool_dict:
            return [{"num_cpus": 0, "scheduling_strategy": "SPREAD"}] * sum(one.on_nodes)
        return [
            {
                "num_cpus": one.cpus,
                "num_gpus": one.gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            }
            for group in self.resource_pool_dict[name].pgs
            for i in range(group.bundle_count)
        ]

    def _wait(self, groups: list[PlacementGroup]) -> bool:
        """Whether Ray gave all of them in time."""
        end = time.monotonic() + self.seconds
        return all(group.wait(max(0.1, end - time.monotonic())) for group in groups)

    def _check_apart(self, one: Wanted, groups: list[PlacementGroup]) -> None:
        nodes = [placement_group_table(group)["bundles_to_node_id"][0] for group in groups]
        if one.apart and len(set(nodes)) < len(nodes):
            raise ValueError(
                f"{one}, but Ray put several on one node, as others had taken their place meanwhile: start it again"
            )

    def _asked(self) -> str:
        gpus, cpus = (sum(sum(o.on_nodes) * getattr(o, kind) for o in self.held) for kind in ("gpus", "cpus"))
        return f"{', '.join(map(str, self.held))} are {_amount(gpus, cpus)}"


def _groups(one: Wanted, nodes: list[str]) -> list[PlacementGroup]:
    """A placement group for each node. Should that node die, Ray may make it again elsewhere."""
    bundle = {name: amount for name, amount in (("CPU", one.cpus), ("GPU", one.gpus)) if amount}
    return [
        placement_group([bundle] * processes, strategy="STRICT_PACK", _soft_target_node_id=node)
        for processes, node in zip(one.on_nodes, nodes, strict=True)
    ]


def _nodes() -> dict[str, Mapping[str, float]]:
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _rooms(nodes: Mapping[str, Mapping[str, float]]) -> dict[str, Room]:
    return {node: Room.of(resources) for node, resources in nodes.items()}


def _listed(nodes: Mapping[str, Room]) -> str:
    counts = Counter(str(room) for room in nodes.values())
    return ", ".join(f"{_count(n, 'node')} with {room}" for room, n in counts.items())


def _amount(gpus: float, cpus: float) -> str:
    parts = [_count(n, kind) for n, kind in ((gpus, "GPU"), (cpus, "CPU")) if n]
    return " and ".join(parts) or "nothing"


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"
