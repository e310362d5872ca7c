"""KL divergence to the reference policy, added to any policy-gradient loss by `actor.use_kl_loss`."""

from typing import Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn, divergence, per_part


class KLLoss(DiffusionLossFn):
    """KL divergence between current and reference reverse-SDE means."""

    required_model_output_keys = ("prev_sample_mean", "std_dev_t")
    required_data_keys = ("ref_prev_sample_mean",)

    @classmethod
    def compute_loss(
        cls,
        *,
        prev_sample_mean: torch.Tensor,
        ref_prev_sample_mean: torch.Tensor,
        std_dev_t: torch.Tensor,
        kl_std: torch.Tensor | None = None,
        log_prob_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean((μ-μ_ref)²)/(2d²)``, d = ``kl_std``. It has a gradient.

        d is what the authors of the step divide by, so that their `kl_loss_coef` means the same here: s of Flow-GRPO's
        step, a penalty per unit of time, else s·√(-dt), the KL of the two Gaussians. Without it d = s. Means are
        (B, ...), std_dev_t and kl_std (B, 1, ...) or scalar. ``log_prob_weights`` (B, N) are those of a
        log-probability's mean, and so the inner mean's.
        """
        d = per_part(std_dev_t if kl_std is None else kl_std, len(prev_sample_mean))
        loss = divergence(prev_sample_mean - ref_prev_sample_mean.detach(), d, log_prob_weights).mean()
        return loss, {"kl_loss": loss.detach()}
