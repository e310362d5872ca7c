"""Flow-DPPO (arXiv 2606.11025): a divergence mask in place of clipping.

The KL divergence between two Gaussian steps is known exactly from their means. A pair is left out only where that
divergence has reached the threshold and the update would carry it still further away; corrections always count.

`diffusion_loss.extra`:
    kl_mask_threshold   τ, the divergence from which on a pair is held back (1e-5)
"""

from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn, check_rows, divergence, per_part, weighted_mean
from verl_omni.algorithms.flow_grpo import clamp_advantages, log_prob_metrics, ratio_metrics
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss
from verl_omni.config.knob import Range

if TYPE_CHECKING:
    from verl_omni.config import DiffusionActorConfig

register_algorithm(
    Algorithm(
        name="flow_dppo",
        loss="flow_dppo",
        description="Flow-DPPO: an exact divergence mask in place of ratio clipping",
    )
)


@register_diffusion_loss("flow_dppo")
class FlowDPPOLoss(DiffusionLossFn):
    """Policy gradient without clipping, masked where the step's exact KL divergence is too large and growing."""

    required_model_output_keys = ("log_probs", "prev_sample_mean", "std_dev_t")
    required_data_keys = ("old_log_probs", "advantages", "old_prev_sample_mean", "sqrt_dt")
    defaults = {"adv_clip_max": 5.0, "extra": {"kl_mask_threshold": 1e-5}}
    extra_ranges = {"kl_mask_threshold": Range(above=0)}

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
        """``KL = mean(Δμ²/(2·s²·(-dt)))``; ``mean(where(keep, -Aρ, 0))``. Shapes as in GRPO-Guard's loss."""
        check_rows(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, weights=rollout_is_weights)
        settings, rows = cls.settings(config), len(log_prob)
        advantages = clamp_advantages(advantages, settings)
        ratio = torch.exp(log_prob - old_log_prob)
        std = per_part(std_dev_t, rows) * per_part(sqrt_dt, rows)
        kl = divergence(prev_sample_mean.detach() - old_prev_sample_mean, std, log_prob_weights)
        outward = ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))
        masked = (kl >= settings.kl_mask_threshold) & outward
        loss = torch.where(masked, 0.0, -advantages * ratio)
        metrics = {
            "dppo_masked_frac": masked.float().mean(),
            "dppo_kl": kl.mean(),
            **ratio_metrics(ratio),
            **log_prob_metrics(old_log_prob, log_prob),
        }
        return weighted_mean(loss, rollout_is_weights), metrics
