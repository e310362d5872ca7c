"""What to type for a way to run, so that `train` takes it beside the settings that were planned with."""

from collections.abc import Iterator
from typing import Any

from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.trainer.forecast.machines import Pool, on_machines
from verl_omni.trainer.forecast.ways import Way, machine

ARR = "actor_rollout_ref"
FSDP, ENGINE, ROLLOUT = f"{ARR}.actor.fsdp_config", f"{ARR}.actor.engine", f"{ARR}.rollout"


def overrides(way: Way, given: DiffusionTrainerConfig) -> list[str]:
    """The devices, what the way consists of, and what of the settings would not go with it."""
    return [f"{name}={value}" for found in (_layout, _servers, _beside) for name, value in found(way, given)]


def _layout(way: Way, given: DiffusionTrainerConfig) -> Iterator[tuple[str, Any]]:
    (nodes, gpus), each = _pools(way, given)[0], way.layout.parts
    yield "trainer.n_gpus_per_node", gpus
    yield "trainer.nnodes", nodes  # --gpus has changed both in `given`
    own = given.actor_rollout_ref.actor.fsdp_config
    if way.layout.replicate > 1:
        yield f"{FSDP}.fsdp_size", each
    elif own.fsdp_size not in (-1, each):
        yield f"{FSDP}.fsdp_size", -1
    if way.layout.sequence > 1 or own.ulysses_sequence_parallel_size > 1:
        yield f"{FSDP}.ulysses_sequence_parallel_size", way.layout.sequence


def _servers(way: Way, given: DiffusionTrainerConfig) -> Iterator[tuple[str, Any]]:
    trainer, own, (nodes, gpus) = given.trainer, given.actor_rollout_ref.rollout, _pools(way, given)[1]
    if way.servers or trainer.mode != "colocated":
        yield "trainer.mode", way.mode
    if not way.servers and trainer.mode != "colocated":  # which `hybrid_engine` may have said
        yield f"{ARR}.hybrid_engine", "true"
    counts = {"n_gpus_per_node": gpus or None, "nnodes": nodes if nodes > 1 else None}
    for name, value in counts.items():
        if value is not None or getattr(own, name) is not None:
            short = getattr(given.rollout, name) is not None  # one setting by two names
            yield f"{'rollout' if short else ROLLOUT}.{name}", "null" if value is None else value
    if way.mode != trainer.mode and trainer.max_staleness is not None:
        yield "trainer.max_staleness", "null"
    if way.mode != trainer.mode and trainer.stale_groups != "drop":
        yield "trainer.stale_groups", "drop"


def _beside(way: Way, given: DiffusionTrainerConfig) -> Iterator[tuple[str, Any]]:
    arr, layout = given.actor_rollout_ref, way.layout
    whole = layout.parts == 1
    if arr.rollout.share_samples and (way.servers or layout.sequence == 1):
        yield f"{ROLLOUT}.share_samples", "false"
    if arr.rollout.gather == "blocks" and (way.servers or whole):
        yield f"{ROLLOUT}.gather", "whole"
    if arr.actor.engine.fold_lora and (way.servers or (whole and layout.world > 1)):
        yield f"{ENGINE}.fold_lora", "null"
    if arr.actor.engine.compile_ahead and layout.sequence > 1:
        yield f"{ENGINE}.compile_ahead", "null"
    if arr.actor.engine.activation_memory_budget < 1 and layout.sequence > 1:
        yield f"{ENGINE}.activation_memory_budget", 1.0


def _pools(way: Way, given: DiffusionTrainerConfig) -> tuple[Pool, Pool]:
    found = on_machines(way.layout.world, way.servers, machine(given))
    if found is None:
        raise ValueError(f"{way.layout.world} GPUs that train and {way.servers} that draw do not go on machines evenly")
    return found
