"""Flash-GRPO (arXiv 2605.15980): one stochastic step a prompt, and steps that pull equally hard wherever it lies.

The gradient of a step's log-probability to the velocity grows with ``√(-dt)/s + s·√(-dt)·(1-σ)/(2σ)``. The clipped loss
is divided by it, and multiplied by the mean over all steps that may be chosen, so that the learning rate keeps its
meaning. With one step trained an image, an update costs a fraction of Flow-GRPO's.
"""

from typing import Any

import torch

from verl_omni.algorithms.base import per_row
from verl_omni.algorithms.flow_grpo import FlowGRPOLoss, weigh_steps
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss

register_algorithm(
    Algorithm(
        name="flash_grpo",
        loss="flash_grpo",
        rollout={"sde_type": "sde", "noise_level": 0.7, "sde_window_size": 1, "sde_window_per_group": True},
        description="Flash-GRPO: one stochastic step a prompt, steps weighted to pull alike",
    )
)


def step_weight(sigma: torch.Tensor, sqrt_dt: torch.Tensor, std_dev_t: torch.Tensor) -> torch.Tensor:
    """``1/(√(-dt)/s + s·√(-dt)·(1-σ)/(2σ))``, of tensors of one shape."""
    return 1 / (sqrt_dt / std_dev_t + std_dev_t * sqrt_dt * (1 - sigma) / (2 * sigma))


@register_diffusion_loss("flash_grpo")
class FlashGRPOLoss(FlowGRPOLoss):
    """Flow-GRPO's clipped objective, weighted by how weakly a step's log-probability follows the velocity."""

    required_model_output_keys = ("log_probs", "std_dev_t")
    required_data_keys = ("old_log_probs", "advantages", "sqrt_dt", "step_sigma", "schedule")

    @classmethod
    def compute_loss(
        cls,
        *,
        std_dev_t: torch.Tensor,
        sqrt_dt: torch.Tensor,
        step_sigma: torch.Tensor,
        schedule: torch.Tensor,
        rollout_is_weights: torch.Tensor | None = None,
        **clipped: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean(w/mean(w)·max(-Aρ, -A·clip(ρ, 1-ε_low, 1+ε_high)))``.

        std_dev_t is (B, 1, ...) or scalar, sqrt_dt and step_sigma (B,) or scalar, and the rest as in Flow-GRPO's loss.
        ``schedule`` (B, K, 3) has σ, √(-dt) and s of each of the K steps that may be trained: the mean of w is theirs.
        """
        rows = len(clipped["log_prob"])
        own = step_weight(*(per_row(value, rows) for value in (step_sigma, sqrt_dt, std_dev_t)))
        weight = own / step_weight(*schedule.to(own).unbind(dim=2)).mean(dim=1)
        loss, metrics = super().compute_loss(rollout_is_weights=weigh_steps(weight, rollout_is_weights), **clipped)
        return loss, metrics | {"step_weight": weight.detach().mean()}
