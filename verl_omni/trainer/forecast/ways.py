"""The ways to use so many GPUs: who trains, who draws, how weights are shared. What fits, and what is fastest."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verl_omni.algorithms.registry import get_diffusion_loss_fn
from verl_omni.config.actor import AUTO
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.perf.plan import UNDER_WAY
from verl_omni.perf.rates import GPUS_A_MACHINE, USABLE, Rates
from verl_omni.trainer.checks.precision import check_precision
from verl_omni.trainer.checks.workers import check_training_engine
from verl_omni.trainer.forecast.amounts import Amounts, amounts
from verl_omni.trainer.forecast.machines import divisors, on_machines
from verl_omni.trainer.forecast.model import ModelCosts
from verl_omni.trainer.forecast.seconds import Seconds, StepTime
from verl_omni.trainer.forecast.stages import RankMemory, ServerMemory, Stage, TeacherMemory
from verl_omni.workers.engine.micro_batch import FREE, sizes
from verl_omni.workers.layout import Layout

MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"


@dataclass(frozen=True)
class Card:
    """A GPU: how fast, and how many bytes."""

    rates: Rates
    memory: float

    def holds(self, peak: float) -> bool:
        return peak <= USABLE * self.memory


@dataclass(frozen=True)
class Way:
    """One way to run a step."""

    mode: str
    layout: Layout
    servers: int
    stages: tuple[Stage, ...]
    drawing: Seconds
    learning: Seconds
    fits: bool
    micro_batch: int

    @property
    def peak(self) -> float:
        return max(stage.peak for stage in self.stages)

    @property
    def seconds(self) -> float:
        draw, learn = self.drawing.drawing, self.learning.learning
        if not self.servers:
            return draw + learn
        return max(draw, learn, (draw + learn) / UNDER_WAY[self.mode])


class Ways:
    def __init__(
        self,
        settings: DiffusionTrainerConfig,
        tokens: tuple[int, int],
        card: Card,
        known: dict[tuple, ModelCosts] | None = None,
        remember: bool = False,
    ):
        self.settings, self.tokens, self.card, self.remember = settings, tokens, card, remember
        self._costs = {} if known is None else known
        self._can_share: dict[int, bool] = {}

    @cached_property
    def amounts(self) -> Amounts:
        return amounts(self.settings)

    def costs(self, settings: DiffusionTrainerConfig) -> ModelCosts:
        """Measured once for all that differ in what needs no other module."""
        arr = settings.actor_rollout_ref
        model, engine = arr.model, arr.actor.engine
        same = (engine.dtype, engine.model_dtype, self.tokens, repr(model.pipeline))
        key = (model.path, model.lora_rank, repr(model.target_modules), model.base_precision, *same)
        if key not in self._costs:
            self._costs[key] = ModelCosts(settings, self.tokens, self.remember)
        return self._costs[key]

    def way(
        self, layout: Layout, servers: int = 0, mode: str = "colocated", settings: DiffusionTrainerConfig | None = None
    ) -> Way:
        settings = varied(settings or self.settings, {"actor_rollout_ref.hybrid_engine": not servers})
        costs = self.costs(settings)
        settings = self._with_micro_batch(settings, layout)
        rank = RankMemory(costs, settings, self.amounts, layout, self.card.memory)
        stages = tuple(rank.stages())
        if servers:
            stages += tuple(ServerMemory(costs, settings, self.amounts, servers).stages())
        if self.amounts.teachers:
            stages += tuple(TeacherMemory(costs, settings, self.amounts, rank.micro).stages())
        time = StepTime(costs, settings, self.amounts, self.card.rates)
        fits = all(self.card.holds(stage.peak) for stage in stages)
        drawing = time.drawing(servers or layout.world, None if servers else layout)
        return Way(mode, layout, servers, stages, drawing, time.learning(layout, mode), fits, rank.micro)

    def _with_micro_batch(self, settings: DiffusionTrainerConfig, layout: Layout) -> DiffusionTrainerConfig:
        """A number in place of auto: the largest that a trial of the blocks as they are written would let pass. Which
        of the smaller ones is as fast is for the trial to see."""
        actor = settings.actor_rollout_ref.actor
        if actor.ppo_micro_batch_size_per_gpu != AUTO:
            return settings
        unit = get_diffusion_loss_fn(actor.diffusion_loss.loss_mode).rows_per_unit
        written = varied(settings, {"actor_rollout_ref.actor.engine.use_torch_compile": False})
        found = unit
        for rows in sizes(unit, self.amounts.pairs(layout)):
            tried = varied(written, {MICRO_BATCH: rows})
            rank = RankMemory(self.costs(settings), tried, self.amounts, layout, self.card.memory)
            if rank.update().peak > (1 - FREE) * self.card.memory:
                break
            found = rows
        return varied(settings, {MICRO_BATCH: found})

    def asked(self, layout: Layout, settings: DiffusionTrainerConfig | None = None) -> Way:
        """As the settings have it."""
        mode, rollout = self.settings.trainer.mode, self.settings.actor_rollout_ref.rollout
        servers = 0 if mode == "colocated" else (rollout.n_gpus_per_node or 1) * (rollout.nnodes or 1)
        return self.way(layout, servers, mode, settings)

    def all(self, gpus: int) -> list[Way]:
        """Every one that divides the batch and that machines have the GPUs for: first those that fit, the fastest of
        them first."""
        found, own = [], self.settings.trainer.mode
        for training in range(1 if self.amounts.draws else gpus, gpus + 1):
            if on_machines(training, gpus - training, machine(self.settings)) is None:
                continue
            for layout in self._layouts(training):
                if training == gpus:
                    found.append(self.way(layout))
                else:
                    modes = {"separate", own} - {"colocated"}
                    found += [self.way(layout, gpus - training, mode) for mode in modes]
        return sorted(found, key=lambda way: (not way.fits, round(way.seconds, 2), way.peak))

    def _layouts(self, ranks: int) -> Iterator[Layout]:
        for sequence in filter(self._shares_samples, divisors(ranks)):
            for shard in divisors(ranks // sequence):
                layout = Layout(ranks // sequence // shard, shard, sequence)
                if self.amounts.mini_images % layout.data == 0:
                    yield layout

    def _shares_samples(self, sequence: int) -> bool:
        """Whether diffusers can cut samples of this model into so many parts."""
        if sequence == 1:
            return True
        if sequence not in self._can_share:
            self._can_share[sequence] = self._try_to_share(sequence)
        return self._can_share[sequence]

    def _try_to_share(self, sequence: int) -> bool:
        arr = self.settings.actor_rollout_ref
        own = dataclasses.replace(arr.actor.fsdp_config, ulysses_sequence_parallel_size=sequence)
        actor = dataclasses.replace(arr.actor, fsdp_config=own)
        try:
            check_training_engine(arr.model, actor)
            check_precision(varied(self.settings, {"actor_rollout_ref.actor": actor}))
        except ValueError:
            return False
        return True


def machine(settings: DiffusionTrainerConfig) -> int:
    """How many GPUs one has: eight, unless the settings take more of one."""
    return max(GPUS_A_MACHINE, settings.trainer.n_gpus_per_node)


def varied(settings: DiffusionTrainerConfig, changes: Mapping[str, Any]) -> DiffusionTrainerConfig:
    """A copy with some settings otherwise, by their full names."""
    for name, value in changes.items():
        settings = _with(settings, name.split("."), value)
    return settings


def _with(place: Any, path: list[str], value: Any) -> Any:
    changed = copy.copy(place)  # all that is not on the way there is shared
    setattr(changed, path[0], value if len(path) == 1 else _with(getattr(place, path[0]), path[1:], value))
    return changed
