"""Weights that correct for samples which another policy drew than the one that learns from them.

lr = log p_train - log p_rollout, clamped to -/+20. The importance weight of a step is exp(lr), that of a sequence (all
steps of a sample) exp(sum of lr), capped above. Rejection looks at k1 = -lr, k2 = lr^2 / 2 or k3 = e^lr - 1 - lr, of a
step or over the steps of a sample. What is rejected is not learned from: it is in no term of the loss, and nothing is
divided by it. The formulas are those of verl, whose tokens are our steps; both words are understood.
"""

import dataclasses
from typing import NamedTuple

import torch

from verl_omni.config.algorithm import RolloutCorrectionConfig
from verl_omni.utils.suggest import unknown

LEVELS = {"step": "token", "token": "token", "sequence": "sequence"}  # our word -> verl's
REJECTIONS = (
    *(f"{level}_k{k}" for level in ("step", "token") for k in (1, 2, 3)),
    *(f"seq_{over}_k{k}" for over in ("sum", "mean") for k in (1, 2, 3)),
    *("seq_max_k2", "seq_max_k3"),
)


class Correction(NamedTuple):
    """Of each step, (B, W): its weight (None: they have none) and whether it is kept; metrics `rollout_corr/*`."""

    weights: torch.Tensor | None
    kept: torch.Tensor
    metrics: dict[str, float]


def is_on(config: RolloutCorrectionConfig) -> bool:
    return config.rollout_is is not None or config.rollout_rs is not None


def weighs(config: RolloutCorrectionConfig) -> bool:
    """Whether weights are in the loss. Where its ratio is to the policy that drew, it is the weight itself."""
    return config.rollout_is is not None and not config.bypass_mode


def check_correction(config: RolloutCorrectionConfig, where: str = "algorithm.rollout_correction") -> None:
    """Names and thresholds are such that `correct` can be computed."""
    for name in [] if config.rollout_rs is None else config.rollout_rs.split(","):
        if name.strip() not in REJECTIONS:
            raise ValueError(unknown(f"{where}.rollout_rs", name.strip(), REJECTIONS))
    if config.rollout_rs is not None and config.rollout_rs_threshold is None:
        raise ValueError(f"{where}.rollout_rs={config.rollout_rs} needs {where}.rollout_rs_threshold, such as 2.0")
    for one in ("rollout_is", "rollout_rs"):
        other = "rollout_rs" if one == "rollout_is" else "rollout_is"
        try:
            correct(torch.zeros(1, 1), torch.zeros(1, 1), dataclasses.replace(config, **{other: None}))
        except (TypeError, ValueError) as error:
            threshold = getattr(config, f"{one}_threshold")
            raise ValueError(f"{where}.{one}_threshold={threshold}: {error}") from error


def correct(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, config: RolloutCorrectionConfig
) -> Correction:
    """Of log-probabilities (B, W) of training and of the rollout."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=old_log_probs,
        rollout_log_prob=rollout_log_probs,
        response_mask=torch.ones_like(old_log_probs),
        rollout_is=None if config.rollout_is is None else LEVELS[config.rollout_is],
        rollout_is_threshold=_bounds(config.rollout_is_threshold),
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=None if config.rollout_rs is None else config.rollout_rs.replace("step_", "token_"),
        rollout_rs_threshold=_bounds(config.rollout_rs_threshold),
    )
    return Correction(None if weights is None else weights.batch["rollout_is_weights"], kept.bool(), metrics)


def _bounds(threshold: float | list[float] | str | None) -> str | float | None:
    """An upper bound, or [lower, upper], as verl writes it."""
    return "_".join(map(str, threshold)) if isinstance(threshold, list | tuple) else threshold
