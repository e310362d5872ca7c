"""How a segment of stored samples is replayed. An engine holds one of these: it knows no engine by name.

A sample's steps, or the noise levels at which it is trained, are a batch dimension: B samples with W of them are B * W
independent pairs, and any split of them into micro-batches gives the same gradient.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.settings import sized
from verl_omni.workers import columns
from verl_omni.workers.columns import Ragged
from verl_omni.workers.layout import Layout

Batch = dict[str, torch.Tensor | Ragged]


@dataclass(frozen=True)
class MicroBatch:
    """Pairs that go through the model at once: rows of the batch, and steps or levels within each."""

    rows: torch.Tensor
    within: torch.Tensor
    #: of the batch's mean
    share: float
    #: their numbers among all pairs of the batch; none where a rank only keeps the others company
    numbers: torch.Tensor

    @property
    def counts(self) -> bool:
        return len(self.numbers) > 0


class Replays(Protocol):
    """What a replay asks of the engine that holds it."""

    model_config: DiffusionModelConfig
    adapter: type[DiffusionModelBase]
    module: torch.nn.Module
    device: torch.device
    layout: Layout
    rows_per_unit: int
    rounds_like_rollout: bool

    def whole_units(self, rows: int) -> int: ...

    def eval_mode(self) -> AbstractContextManager: ...

    def policy(self, name: str) -> AbstractContextManager: ...

    def infer_batch(self, data: Batch, *, training_graph: bool = False) -> dict[str, Any]: ...


class Replay:
    """What a forward computes of stored samples, and of which of their parts."""

    #: what of a sample is a pair of its own: see `columns.Column.per`
    per: ClassVar[str]
    #: what a loss may ask of the model's forward
    outputs: ClassVar[frozenset[str]]

    def __init__(self, engine: Replays):
        self.engine = engine
        self._drawn: dict[tuple, tuple[DiffusionModelConfig, Any]] = {}
        self.model_config, self.scheduler = self._settings(self.configured(engine.model_config))

    @property
    def adapter(self) -> type[DiffusionModelBase]:
        return self.engine.adapter

    # ---- what one kind of replay says of itself ------------------------------------------------------

    def configured(self, model_config: DiffusionModelConfig) -> DiffusionModelConfig:
        """The model's settings, as samples are replayed."""
        return model_config

    def pairs(self, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and step (or level) of every pair, in the order of what a forward gives back."""
        raise NotImplementedError

    def timesteps(self, data: Batch) -> torch.Tensor:
        """Where the samples of a mini-batch are trained, (B, K)."""
        raise NotImplementedError

    def model_outputs(self, micro_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the loss sees of the model: `outputs`."""
        raise NotImplementedError

    def check(self, data: Batch) -> None:
        """Refuse what no later stage could name, while it is still in CPU memory."""

    def before_update(self, data: Batch, anchors: Mapping[str, str], versions: Sequence[int] = ()) -> Batch:
        """Add to a mini-batch what has to be computed before the first optimizer step."""
        return data

    # ---- a sample's own settings ---------------------------------------------------------------------

    def _settings(self, model_config: DiffusionModelConfig) -> tuple[DiffusionModelConfig, Any]:
        """(the settings, the noise schedule) of samples that are drawn in this way."""
        scheduler = self.adapter.build_scheduler(model_config)
        self.adapter.set_timesteps(scheduler, model_config, self.engine.device)
        return model_config, scheduler

    def kinds(self, data: Batch) -> list[tuple]:
        """Of each sample: how large it is and how much noise its steps have. Those of one kind can share a forward."""
        rows = len(data["sigma"] if "sigma" in data else data["all_timesteps"])
        sizes = map(tuple, data["size"].tolist()) if "size" in data else [None] * rows
        noise = data["noise_level"].tolist() if "noise_level" in data else [None] * rows
        return list(zip(sizes, noise, strict=True))

    def drawn_as(self, kind: tuple) -> tuple[DiffusionModelConfig, Any]:
        """The model's settings with the size and the noise that samples of this kind were drawn with."""
        if kind not in self._drawn:
            size, noise = kind
            own = self.model_config if size is None else sized(self.model_config, size)
            if noise not in (None, own.algo.noise_level):
                own = dataclasses.replace(own, algo=dataclasses.replace(own.algo, noise_level=noise))
            as_configured = own is self.model_config
            self._drawn[kind] = (own, self.scheduler) if as_configured else self._settings(own)
        return self._drawn[kind]

    # ---- micro-batches -------------------------------------------------------------------------------

    def split(self, data: Batch, size: int) -> Iterable[MicroBatch]:
        """Micro-batches of up to `size` pairs of one kind.

        A column `share` says the part of the rank's mean of each sample (B,), or of each of its pairs (B, K). Those
        with 0 run only where a rank has nothing else to run: every rank takes part in every forward. So ranks whose
        samples have several sizes agree on how many there are before the first one.
        """
        parts = self._split(data, size)
        if "mixed" not in data or not self.engine.layout.is_spread:
            return parts
        parts = list(parts)
        rows, within = self.pairs(data)
        unit = slice(self.engine.whole_units(1))
        missing = self._most_of_all_ranks(len(parts)) - len(parts)
        return parts + [MicroBatch(rows[unit], within[unit], 0.0, rows[:0])] * missing

    def _split(self, data: Batch, size: int) -> Iterator[MicroBatch]:
        rows, within = self.pairs(data)
        share = data["share"] if "share" in data else None
        each = 1
        if share is not None and share.ndim == 1:
            share, each = share[rows], len(rows) // len(share)
        for chosen in self._of_one_kind(data, rows):
            for part in chosen.split(self.engine.whole_units(size)):
                row, index = rows[part], within[part]
                weight = len(row) / len(rows)
                if share is not None:
                    weights = share.flatten()[part]
                    weight, real = weights.sum().item() / each, weights > 0
                    if real.any():
                        row, index, part = row[real], index[real], part[real]
                yield MicroBatch(row, index, weight, part)

    def _of_one_kind(self, data: Batch, rows: torch.Tensor) -> list[torch.Tensor]:
        """Which pairs can share a forward. All of them, but where samples have sizes of their own."""
        kinds = self.kinds(data)
        if len(set(kinds)) == 1:
            return [torch.arange(len(rows))]
        number = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
        own = torch.tensor([number[kind] for kind in kinds])[rows]
        return [(own == place).nonzero()[:, 0] for place in number.values()]

    def _most_of_all_ranks(self, count: int) -> int:
        most = torch.tensor(count, device=self.engine.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def take(self, data: Batch, part: MicroBatch) -> dict[str, torch.Tensor]:
        """The pairs of a micro-batch on the device, as the model and the loss see them."""
        batch = {}
        for name, value in data.items():
            column = columns.of(name)
            if column.seen:
                index = (part.rows, part.within) if column.per == self.per else part.rows
                batch[name] = value[index] if column.host else self.taken(value, index)
        return batch

    def taken(self, value: torch.Tensor | Ragged, index: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Of a column what `index` says, on the device; nobody waits for it."""
        device = self.engine.device
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            index = tree_map(lambda places: places.to(value.device, non_blocking=True), index)  # the host runs ahead
        found = value[index]
        if found.device == device:
            return found
        return (found.pin_memory() if device.type == "cuda" else found).to(device, non_blocking=True)


def in_order(outputs: list[tuple[MicroBatch, dict[str, torch.Tensor]]]) -> Batch:
    """What the forwards gave, in the order of the pairs."""
    if not outputs:
        return {}
    places = torch.cat([part.numbers for part, _ in outputs]).argsort()
    in_place, found = bool((places.diff() > 0).all()), {}
    for name in outputs[0][1]:
        values = [output[name] for _, output in outputs]
        if in_place and len({value.shape[1:] for value in values}) == 1:
            found[name] = torch.cat(values)
        else:
            rows = [row for value in values for row in value]
            found[name] = columns.as_they_are([rows[place] for place in places.tolist()])
    return found
