"""How many pairs go through the model at once: of those numbers that fit, the fastest, found by a short trial.

Each candidate goes forward and backward twice with pairs of the run, and nothing is kept of it. Several ranks meet
within a forward, where an error of one would leave the others waiting: so no candidate is tried that those before it,
on any rank, show to be too large. Activations grow with the rows.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from verl.utils.device import get_torch_device

from verl_omni.workers import columns
from verl_omni.workers.engine.optimizer import state_to_come
from verl_omni.workers.engine.protocol import TrainingEngine
from verl_omni.workers.engine.replay import Batch, MicroBatch

FREE = 0.1  # of the device's memory: it stays free in the largest candidate
GAIN = 1.03  # of the rate: less gained is not worth the memory


@dataclass(frozen=True)
class Tried:
    """Memory is a part of what there may be taken of the device's: at the peak, and between the passes."""

    rows: int
    seconds: float
    peak: float
    kept: float

    @property
    def rate(self) -> float:
        return self.rows / self.seconds


def sizes(unit: int, most: int) -> Iterator[int]:
    """Once, twice, four times, ... as many as belong together, and all."""
    rows = unit
    while rows < most:
        yield rows
        rows *= 2
    yield max(unit, most)


def find_micro_batch(engine: TrainingEngine, data: Batch, most: int, beside: float = 0.0) -> tuple[int, str]:
    """(the number of pairs, why), the same on all ranks. `data` is as a forward takes it, `most` a mini-batch's, and
    `beside` the bytes of the device that another model will take."""
    # Later mini-batches are without the rollout's unconditional half, and compute more.
    data = columns.near({k: v for k, v in data.items() if k != "uncond_velocity"}, engine.device)
    pairs, room, tried, end = _largest(engine, data), _room(engine, beside), [], "a mini-batch has no more"
    devices = [] if engine.device.type == "cpu" else [engine.device]
    # Compiled, each candidate would take minutes. As it is written a block takes more memory: what fits, fits compiled.
    with torch.random.fork_rng(devices, device_type=engine.device.type), torch.compiler.set_stance("force_eager"):
        for rows in sizes(engine.rows_per_unit, engine.whole_units(most)):
            if tried and expected(tried, rows) > 1:
                end = f"{rows} would leave less than {FREE:.0%} of the memory free"
                break
            try:
                tried.append(_try(engine, data, pairs, rows, room))
            except torch.OutOfMemoryError:
                if not tried or engine.layout.is_spread:
                    raise
                end = f"{rows} ran out of memory"
                break
            finally:
                engine.optimizer_zero_grad()
    get_torch_device().empty_cache()
    shown = ", ".join(f"{one.rows}: {one.rate:.3g}" for one in tried)
    return fastest(tried).rows, f"rows/s of those tried: {shown}; {end}"


def expected(tried: list[Tried], rows: int) -> float:
    """The peak of so many, on the line through the last two; of one alone all that comes and goes is as large as it."""
    *before, last = tried
    other, base = (before[-1].rows, before[-1].peak) if before else (0, last.kept)
    return last.peak + (rows - last.rows) * (last.peak - base) / (last.rows - other)


def fastest(tried: list[Tried]) -> Tried:
    """The smallest that is about as fast as any that fits; where none does, the smallest of all."""
    fits = [one for one in tried if one.peak <= 1] or tried[:1]
    best = max(one.rate for one in fits)
    return next(one for one in fits if one.rate * GAIN >= best)


def _largest(engine: TrainingEngine, data: Batch) -> tuple[torch.Tensor, ...]:
    """Row and step of the pairs whose samples are the largest there are: they can share a forward."""
    rows, within = engine.replay.pairs(data)
    kinds = engine.replay.kinds(data)
    largest = max(kinds, key=lambda kind: math.prod(max(1, side) for side in kind[0] or ()))
    own = torch.tensor([kind == largest for kind in kinds])[rows]
    return rows[own], within[own]


def _try(engine: TrainingEngine, data: Batch, pairs: tuple[torch.Tensor, ...], rows: int, room: float) -> Tried:
    device, numbers = get_torch_device(), torch.arange(rows)
    part = MicroBatch(*(one[numbers % len(one)] for one in pairs), 1.0, numbers)
    device.reset_peak_memory_stats()
    for last in (False, True):  # the second one is timed, and finds the first one's gradients where they will be
        began = time.perf_counter()
        engine.begin_micro_batch(last)
        with engine.autocast():
            found = engine.prepare_model_outputs(engine.replay.take(data, part))
        sum(value.float().mean() for value in found.values() if value.requires_grad).backward()
        del found
        device.synchronize()
    seconds, peak, kept = time.perf_counter() - began, device.max_memory_allocated(), device.memory_allocated()
    offloads = engine.is_optimizer_offload_enabled
    waiting = 0.0 if offloads else state_to_come(engine.optimizer, engine.optimizer_config)
    measured = torch.tensor([seconds, (peak + waiting) / room, (kept + waiting) / room], device=engine.device)
    if engine.layout.is_spread:
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    return Tried(rows, *measured.tolist())


def _room(engine: TrainingEngine, beside: float = 0.0) -> float:
    """Bytes of the device that this process has or may have, but for what is to stay free or is for others."""
    if engine.device.type == "cpu":
        return math.inf
    device = get_torch_device()
    free, total = device.mem_get_info()
    share = getattr(device, "get_per_process_memory_fraction", lambda: 1.0)()  # where others are to have the rest
    return max(1.0, min(free + device.memory_reserved(), share * total) - FREE * total - beside)
