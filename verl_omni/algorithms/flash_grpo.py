"""Flash-GRPO (arXiv 2605.15980): one stochastic step a prompt, and steps that pull equally hard wherever it lies.

The log-probability of Flow-GRPO's step follows the velocity as steeply as ``√(-dt)/s + s·√(-dt)·(1-σ)/(2σ)``; that of
another type of step has a steepness of its own. The clipped loss is divided by it, and by the mean of what this gives
for all steps that may be chosen, so that the learning rate keeps its meaning. With one step trained an image, an update
costs a fraction of Flow-GRPO's.
"""

from typing import Any

import torch

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


@register_diffusion_loss("flash_grpo")
class FlashGRPOLoss(FlowGRPOLoss):
    """Flow-GRPO's clipped objective, weighted by how weakly a step's log-probability follows the velocity."""

    required_data_keys = ("old_log_probs", "advantages", "step_pull", "schedule_pulls")

    @classmethod
    def compute_loss(
        cls,
        *,
        step_pull: torch.Tensor,
        schedule_pulls: torch.Tensor,
        rollout_is_weights: torch.Tensor | None = None,
        **clipped: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean(w/mean(w)·max(-Aρ, -A·clip(ρ, 1-ε_low, 1+ε_high)))``, ``w = 1/|∂ log p/∂v|``.

        ``step_pull`` (B,) is the steepness of a pair's step, ``schedule_pulls`` (B, K) that of each of the K steps that
        may be trained: the mean of w is theirs. The rest as in Flow-GRPO's loss.
        """
        weight = 1 / (step_pull * (1 / schedule_pulls).mean(dim=1))
        loss, metrics = super().compute_loss(rollout_is_weights=weigh_steps(weight, rollout_is_weights), **clipped)
        return loss, metrics | {"step_weight": weight.detach().mean()}
