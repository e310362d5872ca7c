"""Trajectories go from where they are made to where they are used, never through the driver.

The driver needs an image's reward and a few numbers; latents and text features are only needed by the rank that trains
on them. A sample that this rank draws for itself stays here. Any other goes into Ray's object store, and what travels
is a reference. It is an answer of its own to the request: Ray keeps it for who asked, even if who drew it has died.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from verl.protocol import DataProto

from verl_omni.utils.arrays import object_array
from verl_omni.workers import columns
from verl_omni.workers.host_memory import on_host
from verl_omni.workers.rollout.base import RolloutOutput, own_copy

# The column of a batch that says where the rest is.
COLUMN = "trajectory"


@dataclass(frozen=True)
class TrajectoryRef:
    """`key` is `<experience>/<sample>`. Without an object the trajectory lies in the worker that trains on it.

    `more` is what another process has found of it since.
    """

    key: str
    stored: Any = None  # a ray.ObjectRef
    more: Any = None  # another one


@dataclass(frozen=True)
class Several:
    """Where the requests lie that made one sample, each with equally many steps."""

    parts: tuple[TrajectoryRef, ...]


def parts_of(data: DataProto) -> list[tuple[TrajectoryRef, ...]]:
    """Of each row the requests that made it."""
    found = data.non_tensor_batch[COLUMN] if COLUMN in data.non_tensor_batch else ()
    return [one.parts if isinstance(one, Several) else (one,) for one in found]


def requests_a_sample(data: DataProto) -> int:
    counts = sorted({len(parts) for parts in parts_of(data)} or {1})
    if len(counts) > 1:
        raise ValueError(
            f"agent loops name {' and '.join(map(str, counts))} requests of samples of one batch to be trained on: "
            "expected as many of each sample"
        )
    return counts[0]


def with_more(own: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The references of these rows, with what lies under those of the same rows that were found."""
    return object_array([_with_more(one, other) for one, other in zip(own, found, strict=True)])


def _with_more(own: TrajectoryRef | Several, found: TrajectoryRef | Several) -> TrajectoryRef | Several:
    if isinstance(own, Several):
        return Several(tuple(map(_with_more, own.parts, found.parts)))
    return dataclasses.replace(own, more=found.stored)


def unfolded(tensors: dict[str, torch.Tensor], parts: int) -> dict[str, torch.Tensor]:
    """A row for each request: the steps of a sample are those of its requests, one after the other."""
    if parts == 1:
        return tensors
    for name, why in (("train_steps", "algorithm.timestep_fraction below 1"), ("sigma", "direct preference")):
        if name in tensors:
            raise ValueError(f"an agent loop names {parts} requests to be trained on, which {why} has no way for")
    stepwise = {k for k, v in tensors.items() if columns.of(k).per == "step" or (k == "share" and v.ndim == 2)}
    return {
        name: value.unflatten(1, (parts, -1)).flatten(0, 1) if name in stepwise else value.repeat_interleave(parts, 0)
        for name, value in tensors.items()
    }


def large_part(output: RolloutOutput) -> dict[str, torch.Tensor]:
    """What training needs of a sample: its stored steps, or its end where none was stored, and its conditions."""
    columns.check_drawn(output.trajectory)
    large = {k: v for k, v in output.trajectory.items() if columns.of(k).large}
    if "all_latents" in large:
        large.pop("final_latents", None)
    return large | output.conditions


def by_reference(output: RolloutOutput, reference: TrajectoryRef | None) -> RolloutOutput:
    """The answer without what is large, ready to leave the process."""
    small = {k: v for k, v in output.trajectory.items() if not columns.of(k).large}
    return dataclasses.replace(output, trajectory=small, conditions={}, reference=reference).cpu()


def in_two_parts(output: RolloutOutput) -> tuple[RolloutOutput, dict[str, torch.Tensor]]:
    """(what the driver gets, what is fetched by who trains on it), ready to leave the process."""
    return by_reference(output, None), {k: own_copy(v) for k, v in large_part(output).items()}


class TrajectoryStore:
    """The trajectories that a training worker holds, of any number of experiences: where they were drawn, or `on_host`
    in CPU memory."""

    def __init__(self, on_host: bool = False) -> None:
        self.rows: dict[str, dict[str, torch.Tensor]] = {}
        self.on_host = on_host

    def keep(self, key: str, output: RolloutOutput) -> RolloutOutput:
        """A sample of several segments comes in parts."""
        large = large_part(output)
        self.rows[key] = self.rows.get(key, {}) | (on_host(large) if self.on_host else large)
        return by_reference(output, TrajectoryRef(key))

    def release(self, *experiences: str) -> None:
        """Forget their samples."""
        self.rows = {key: row for key, row in self.rows.items() if key.split("/")[0] not in experiences}

    def holds(self, data: DataProto) -> bool:
        return COLUMN in data.non_tensor_batch

    def batch(self, data: DataProto) -> dict[str, columns.Ragged]:
        """The trajectories of these samples, by column, where they lie. What lies elsewhere is fetched once."""
        if not self.holds(data):
            return {}
        references = [reference for parts in parts_of(data) for reference in parts]
        absent = {r.key: r for r in references if r.key not in self.rows}
        strangers = [key for key, r in absent.items() if r.stored is None]
        if strangers:
            raise KeyError(f"samples {strangers[:4]} are not in this worker and nowhere else")
        if absent:
            self.rows |= dict(zip(absent, self.fetch([r.stored for r in absent.values()]), strict=True))
        if more := {r.key: r.more for r in references if r.more is not None}:
            for key, found in zip(more, self.fetch([*more.values()]), strict=True):
                self.rows[key] = self.rows[key] | found
        rows = [self.rows[r.key] for r in references]
        return {name: columns.kept(name, [row[name] for row in rows]) for name in rows[0]}

    def fetch(self, stored: list[Any]) -> list[dict[str, torch.Tensor]]:
        return ray.get(stored)

    def store(self, row: dict[str, torch.Tensor]) -> Any:
        return ray.put(row)

    def lent(self, data: DataProto, wanted: Callable[[str], bool]) -> np.ndarray:
        """Of these samples the references under which any process can fetch the wanted columns."""
        stored: dict[str, Any] = {}
        for key in (reference.key for parts in parts_of(data) for reference in parts):
            if key not in stored:
                stored[key] = self.store({k: own_copy(v) for k, v in self.rows[key].items() if wanted(k)})
        found = [tuple(TrajectoryRef(one.key, stored[one.key]) for one in parts) for parts in parts_of(data)]
        return object_array([parts[0] if len(parts) == 1 else Several(parts) for parts in found])

    def add(self, data: DataProto, fields: dict[str, torch.Tensor]) -> None:
        for i, parts in enumerate(parts_of(data)):
            own = {name: value[i].unflatten(0, (len(parts), -1)) for name, value in fields.items()}
            for number, reference in enumerate(parts):
                self.rows[reference.key] = self.rows[reference.key] | {k: v[number] for k, v in own.items()}
