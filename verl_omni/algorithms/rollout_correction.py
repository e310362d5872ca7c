"""Weights that correct for samples which another policy drew than the one that learns from them.

lr = log p_train - log p_rollout, clamped to -/+20. The importance weight of a step is exp(lr), that of a sequence (all
steps of a sample) exp(sum of lr), capped above. Rejection looks at k1 = -lr, k2 = lr^2 / 2 or k3 = e^lr - 1 - lr, of a
step or over the steps of a sample; what is rejected has weight 0. The formulas are those of verl, whose tokens are our
steps.
"""

import torch

from verl_omni.config.algorithm import RolloutCorrectionConfig
from verl_omni.utils.suggest import unknown

LEVELS = {"step": "token", "sequence": "sequence"}  # our word -> verl's
REJECTIONS = (
    *(f"step_k{k}" for k in (1, 2, 3)),
    *(f"seq_{over}_k{k}" for over in ("sum", "mean") for k in (1, 2, 3)),
    *("seq_max_k2", "seq_max_k3"),
)


def is_on(config: RolloutCorrectionConfig) -> bool:
    return config.rollout_is is not None or config.rollout_rs is not None


def check_correction(config: RolloutCorrectionConfig, where: str = "algorithm.rollout_correction") -> None:
    """Names and thresholds are such that `correction_weights` can be computed."""
    if config.bypass_mode and is_on(config):
        raise ValueError(
            f"{where}.bypass_mode=true takes the rollout's log-probabilities as the old ones, so that the ratio of the "
            "loss is the correction itself: leave out rollout_is and rollout_rs, or bypass_mode"
        )
    if config.rollout_rs is None:
        return
    for name in config.rollout_rs.split(","):
        if name.strip() not in REJECTIONS:
            raise ValueError(unknown(f"{where}.rollout_rs", name.strip(), REJECTIONS))
    if config.rollout_rs_threshold is None:
        raise ValueError(f"{where}.rollout_rs={config.rollout_rs} needs {where}.rollout_rs_threshold, such as 2.0")
    try:
        correction_weights(torch.zeros(1, 1), torch.zeros(1, 1), config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.rollout_rs_threshold={config.rollout_rs_threshold}: {error}") from error


def correction_weights(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, config: RolloutCorrectionConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """(weights (B, W) of each step, metrics `rollout_corr/*`)."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=old_log_probs,
        rollout_log_prob=rollout_log_probs,
        response_mask=torch.ones_like(old_log_probs),
        rollout_is=None if config.rollout_is is None else LEVELS[config.rollout_is],
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=None if config.rollout_rs is None else config.rollout_rs.replace("step_", "token_"),
        rollout_rs_threshold=_bounds(config.rollout_rs_threshold),
    )
    return kept if weights is None else weights.batch["rollout_is_weights"] * kept, metrics


def _bounds(threshold: float | list[float] | str | None) -> str | float | None:
    """An upper bound, or [lower, upper], as verl writes it."""
    return "_".join(map(str, threshold)) if isinstance(threshold, list | tuple) else threshold
