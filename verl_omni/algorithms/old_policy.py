"""How fast the old policy follows the trained one: ``old ← d·old + (1-d)·new``.

By `algorithm.old_policy_decay_schedule`, d is 0 (a plain copy) for ``flat`` steps, then
``min((step - flat)·rate, hold)``.
"""

from typing import NamedTuple

from verl_omni.utils.suggest import unknown


class Decay(NamedTuple):
    flat: int
    rate: float
    hold: float


OLD_POLICY_DECAY_SCHEDULES: dict[str, Decay] = {
    # published with DiffusionNFT (arXiv 2509.16117)
    "copy": Decay(0, 0.0, 0.0),
    "linear_to_0_5": Decay(0, 0.001, 0.5),
    "delayed_linear_to_0_999": Decay(75, 0.0075, 0.999),
    # published with AWM (arXiv 2509.25050)
    "linear_to_0_3": Decay(0, 0.001, 0.3),
    # an average of some ten steps from the first one on: this project's choice, for DGPO
    "constant_0_9": Decay(0, 0.9, 0.9),
}


def old_policy_decay(step: int, schedule: str = "copy", decay: float | None = None) -> float:
    """d at training step ``step``; a given ``decay`` (`algorithm.old_policy_decay`) is constant and comes first."""
    if decay is not None:
        if not 0 <= decay <= 1:
            raise ValueError(f"algorithm.old_policy_decay={decay}: expected a number from 0 to 1")
        return decay
    if schedule not in OLD_POLICY_DECAY_SCHEDULES:
        raise ValueError(unknown("algorithm.old_policy_decay_schedule", schedule, OLD_POLICY_DECAY_SCHEDULES))
    flat, rate, hold = OLD_POLICY_DECAY_SCHEDULES[schedule]
    return 0.0 if step < flat else min((step - flat) * rate, hold)
