"""Which denoising steps are stochastic and trained; the others take the ODE step and are not trained.

A window of ``sde_window_size`` = w steps lies in ``sde_window_range`` = [lo, hi). By default it is all steps but the
last, which goes to σ' = 0 and is never trained. Where it starts is the schedule's matter (n: training step, from 0):

    random        drawn uniformly from lo ... hi-w, anew at each training step, or for each prompt group
    progressive   min(lo + ⌊n/iters⌋·stride, hi-w), as in MixGRPO (arXiv 2507.21802)
    decay         the same places, but a window that starts at t stays for
                  iters - ⌈(iters-m)·(t-lo)/(hi-lo)⌉ training steps, m = max(1, ⌊iters/4⌋)
    exp_decay     likewise, for ⌈iters·exp(-0.1·max(0, t-13))⌉ training steps

A moving window stays at its last place, hi-w, once it is there.
"""

import math
import random
from fractions import Fraction
from typing import TYPE_CHECKING

from verl_omni.utils.seeds import derive_seed
from verl_omni.utils.suggest import unknown

if TYPE_CHECKING:
    from verl_omni.config import DiffusionRolloutAlgoConfig

# Training steps for which a moving window that starts at t stays: (t, lo, hi, iters) -> count
_STAY = {
    "progressive": lambda t, lo, hi, iters: iters,
    "decay": lambda t, lo, hi, iters: iters - math.ceil(Fraction((iters - max(1, iters // 4)) * (t - lo), hi - lo)),
    "exp_decay": lambda t, lo, hi, iters: math.ceil(iters * math.exp(-0.1 * max(0, t - 13))),
}
SCHEDULES = ("random", *_STAY)
DEFAULT_ITERS = 25  # MixGRPO's
DEFAULT_STRIDE = 1


def sde_window(
    algo: "DiffusionRolloutAlgoConfig", num_steps: int, training_step: int, seed: int, group: int | None = None
) -> range:
    """The window of ``training_step`` (from 0) in a rollout of ``num_steps``.

    ``group`` numbers the prompt; it matters only where ``sde_window_per_group`` gives each prompt a window of its own.
    """
    check_window(algo, num_steps)
    lo, hi, size = _bounds(algo, num_steps)
    schedule = algo.sde_window_schedule or "random"
    if schedule == "random":
        per_group = bool(algo.sde_window_per_group)
        if per_group and group is None:
            raise ValueError("sde_window_per_group is set: the number of the prompt group is needed")
        numbers = (training_step, group) if per_group else (training_step,)
        start = random.Random(derive_seed(seed, "sde window", *numbers)).randint(lo, hi - size)
    else:
        start = _moving_start(algo, lo, hi, hi - size, training_step)
    return range(start, start + size)


def trainable_steps(algo: "DiffusionRolloutAlgoConfig", num_steps: int) -> range:
    """All steps that a window can hold."""
    lo, hi, _ = _bounds(algo, num_steps)
    return range(lo, hi)


def check_window(algo: "DiffusionRolloutAlgoConfig", num_steps: int) -> None:
    """Raise ValueError where the window does not fit into ``num_steps``. Needs no worker."""
    where = "actor_rollout_ref.rollout.algo."
    if num_steps < 2:
        raise ValueError(f"num_inference_steps={num_steps} leaves no step to train (the last never is): use 2 or more")
    if algo.sde_window_range is not None and len(algo.sde_window_range) != 2:
        raise ValueError(f"{where}sde_window_range={list(algo.sde_window_range)}: expected two numbers [lo, hi]")
    lo, hi, size = _bounds(algo, num_steps)
    if not 0 <= lo < hi <= num_steps - 1:
        raise ValueError(
            f"{where}sde_window_range=[{lo}, {hi}] lies outside the {num_steps - 1} steps that can be trained "
            f"(all of num_inference_steps={num_steps} but the last): expected 0 <= lo < hi <= {num_steps - 1}"
        )
    if not 1 <= size <= hi - lo:
        raise ValueError(
            f"{where}sde_window_size={size} does not fit into the steps [{lo}, {hi}): expected 1 to {hi - lo}"
        )
    if algo.sde_window_schedule not in (None, *SCHEDULES):
        raise ValueError(unknown("sde_window_schedule", algo.sde_window_schedule, SCHEDULES))
    for name in ("sde_window_iters", "sde_window_stride"):
        value = getattr(algo, name)
        if value is not None and value < 1:
            raise ValueError(f"{where}{name}={value}: expected 1 or more")


def _bounds(algo: "DiffusionRolloutAlgoConfig", num_steps: int) -> tuple[int, int, int]:
    lo, hi = (0, num_steps - 1) if algo.sde_window_range is None else algo.sde_window_range
    return lo, hi, hi - lo if algo.sde_window_size is None else algo.sde_window_size


def _moving_start(algo: "DiffusionRolloutAlgoConfig", lo: int, hi: int, last: int, training_step: int) -> int:
    iters = algo.sde_window_iters or DEFAULT_ITERS
    stride = algo.sde_window_stride or DEFAULT_STRIDE
    stay = _STAY[algo.sde_window_schedule]
    start, moves_at = lo, 0
    while start < last:
        moves_at += stay(start, lo, hi, iters)
        if training_step < moves_at:
            break
        start = min(start + stride, last)
    return start
