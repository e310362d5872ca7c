"""Where a stage does not fit: which settings make it smaller, tried one by one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_omni.config.actor import AUTO
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.trainer.checks.rollout_engine import check_gather, check_share_samples
from verl_omni.trainer.checks.workers import check_base_precision, check_memory_budget
from verl_omni.trainer.forecast.ways import Way, Ways, varied
from verl_omni.workers.layout import Layout

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
GATHER = f"{ROLLOUT}.gather"
BUDGET = f"{ACTOR}.engine.activation_memory_budget"
BUDGETS = (0.5,)  # each takes a quarter of a minute to reckon
LEAST_GAIN = 0.02  # of a stage's peak: less is not worth a line


@dataclass(frozen=True)
class Help:
    """A change, and the peak of the stage with it."""

    change: dict[str, Any]
    peak: float
    fits: bool

    @property
    def typed(self) -> str:
        return " ".join(f"{name}={str(value).lower()}" for name, value in self.change.items())


def changes(settings: DiffusionTrainerConfig, stage: str) -> Iterator[dict[str, Any]]:
    """What might help in a stage and is not refused, what costs least first."""
    return (change for change in _changes(settings, stage) if _accepted(varied(settings, change)))


def _accepted(settings: DiffusionTrainerConfig) -> bool:
    """By the checks of `train`: ways to draw exclude each other, and not every model has layers for 8 bits."""
    try:
        check_base_precision(settings)
        check_memory_budget(settings)
        check_gather(settings)
        check_share_samples(settings)
    except ValueError:
        return False
    return True


def _changes(settings: DiffusionTrainerConfig, stage: str) -> Iterator[dict[str, Any]]:
    arr = settings.actor_rollout_ref
    full = arr.model.lora_rank == 0
    if stage in ("rollout", "decode", "server: rollout", "server: decode"):
        yield from _halved(f"{ROLLOUT}.max_num_seqs", arr.rollout.max_num_seqs)
        if arr.rollout.cfg_in_one_forward:
            yield {f"{ROLLOUT}.cfg_in_one_forward": False}
        yield {f"{ACTOR}.engine.fold_lora": False}
        yield {f"{ROLLOUT}.vae_tiling": True}
        if not stage.startswith("server"):
            yield {GATHER: "blocks"}
        if stage == "rollout":
            yield {f"{ROLLOUT}.share_samples": True}
    if stage in ("reference", "teacher"):
        rows = arr.ref.log_prob_micro_batch_size_per_gpu or arr.actor.ppo_micro_batch_size_per_gpu
        yield from _halved(f"{REF}.log_prob_micro_batch_size_per_gpu", rows)
    if stage == "teacher":
        devices = arr.actor.teacher.n_gpus_per_node
        yield from ({f"{ACTOR}.teacher.n_gpus_per_node": devices * more} for more in (2, 4))
        return
    if stage == "update":
        budget = arr.actor.engine.activation_memory_budget
        yield from ({BUDGET: share} for share in BUDGETS if share < budget)
        yield {f"{MODEL}.enable_gradient_checkpointing": True} | ({BUDGET: 1.0} if budget < 1 else {})
        yield from _halved(f"{ACTOR}.ppo_micro_batch_size_per_gpu", arr.actor.ppo_micro_batch_size_per_gpu)
    yield {f"{ROLLOUT}.encoder_offload": True}
    yield {f"{ACTOR}.engine.sample_offload": True}
    yield {f"{ACTOR}.engine.optimizer_offload": True}
    if full:
        yield {f"{REF}.param_offload": True}
        yield {f"{ACTOR}.engine.model_dtype": "bfloat16"}
        yield {f"{MODEL}.lora_rank": 32}
    elif arr.model.base_precision is None:
        yield {f"{MODEL}.base_precision": "int8"}


def _halved(name: str, value: int | str) -> Iterator[dict[str, Any]]:
    while value != AUTO and value > 1:  # auto is as small as it has to be
        value //= 2
        yield {name: value}


def helps(ways: Ways, layout: Layout, stage: str) -> list[Help]:
    """Single changes with which the stage fits, or what each gives; and all of them together, where none is enough."""
    now = _peak(ways.asked(layout), stage)
    found: list[Help] = []
    for change in changes(ways.settings, stage):
        if any(change.keys() == other.change.keys() and other.fits for other in found):
            continue  # a smaller one of a number that is small enough
        with_it = _peak(ways.asked(layout, varied(ways.settings, change)), stage)
        if with_it < (1 - LEAST_GAIN) * now:
            found = [other for other in found if other.change.keys() != change.keys()]
            found.append(Help(change, with_it, ways.card.holds(with_it)))
    if not any(help.fits for help in found):
        found += _together(ways, layout, stage, found)
    return found


def _together(ways: Ways, layout: Layout, stage: str, found: list[Help]) -> list[Help]:
    """The first so many of them with which it fits. Block by block is tried first, and what excludes it after that; a
    budget of activations too."""
    for last in ((), (GATHER,), (BUDGET,), (GATHER, BUDGET)):
        order = sorted(found, key=lambda help: any(name in help.change for name in last))  # noqa: B023
        together: dict[str, Any] = {}
        for help in order:
            settings = varied(ways.settings, together | help.change)
            if not _accepted(settings):
                continue
            together |= help.change
            peak = _peak(ways.asked(layout, settings), stage)
            if ways.card.holds(peak):
                return [Help(together, peak, True)]
    return []


def _peak(way: Way, stage: str) -> float:
    return next((s.peak for s in way.stages if s.name == stage), 0.0)
