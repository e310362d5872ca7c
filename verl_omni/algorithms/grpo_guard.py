"""GRPO-Guard (arXiv 2510.22319): ratios of all denoising steps brought to one scale, and steps weighted alike.

Flow-GRPO's log-ratio holds ``-Δμ²/(2c²)``, c = s·√(-dt): ratios lie below 1 on average, the more so the less noise a
step adds, and clipping from above never bites. The loss adds that term back and scales the log-ratio by c. This
cancels exactly for steps with a Gaussian log-probability (sde, dance_sde); others are refused.
"""

from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn, check_rows, divergence, per_part, per_row, weighted_mean
from verl_omni.algorithms.flow_grpo import clipped_objective, log_prob_metrics
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss

if TYPE_CHECKING:
    from verl_omni.config import DiffusionActorConfig

register_algorithm(
    Algorithm(
        name="grpo_guard",
        loss="grpo_guard",
        description="GRPO-Guard: ratio normalisation and 1/dt reweighting against over-optimisation",
    )
)


@register_diffusion_loss("grpo_guard")
class GRPOGuardLoss(DiffusionLossFn):
    """GRPO-Guard clipped policy objective with reverse-SDE mean drift."""

    gaussian_steps = True
    required_model_output_keys = ("log_probs", "prev_sample_mean", "std_dev_t")
    required_data_keys = ("old_log_probs", "advantages", "old_prev_sample_mean", "sqrt_dt")

    @classmethod
    def compute_loss(
        cls,
        *,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        config: "DiffusionActorConfig",
        old_prev_sample_mean: torch.Tensor,
        prev_sample_mean: torch.Tensor,
        std_dev_t: torch.Tensor,
        sqrt_dt: torch.Tensor,
        log_prob_weights: torch.Tensor | None = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``c = s·√(-dt)``, ``b = mean(Δμ²)/(2c²)``, ``ρ = exp((Δlogp + b)·c)``; clipped loss over ``-dt``.

        Log-probabilities and advantages are (B,), means (B, ...), std_dev_t (B, 1, ...) or scalar, sqrt_dt (B,) or
        scalar. c belongs to a pair's own step. ``log_prob_weights`` (B, N) are those of a log-probability's mean, and
        so b's: with others the drift would not cancel.
        """
        check_rows(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, weights=rollout_is_weights)
        rows = len(log_prob)
        std = per_part(std_dev_t, rows) * per_part(sqrt_dt, rows)
        bias = divergence(prev_sample_mean - old_prev_sample_mean, std, log_prob_weights)
        c, sqrt_dt = std.mean(dim=1), per_row(sqrt_dt, rows)
        ratio = torch.exp((log_prob - old_log_prob + bias) * c)
        loss, metrics = clipped_objective(ratio, advantages, cls.settings(config))
        metrics |= log_prob_metrics(old_log_prob, log_prob) | {"guard_bias": bias.detach().mean()}
        return weighted_mean(loss / sqrt_dt**2, rollout_is_weights), metrics
