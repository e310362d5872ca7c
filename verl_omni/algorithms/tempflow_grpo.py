"""TempFlow-GRPO (arXiv 2508.04324): Flow-GRPO whose steps count by the noise that they add.

An early step, which adds much noise, can change the image much; a late one hardly can, and yet has as steep a
log-probability. The clipped loss of a step is weighted by ``c·s·√(-dt)``, the standard deviation of its noise, by which
a Gaussian log-probability is too steep. That of cps is not: it is refused.

`diffusion_loss.extra`:
    weight_scale   c, which makes the weights near 1 on average (2.25)
"""

from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.base import per_row
from verl_omni.algorithms.flow_grpo import FlowGRPOLoss, weigh_steps
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss
from verl_omni.config.knob import Range

if TYPE_CHECKING:
    from verl_omni.config import DiffusionActorConfig

register_algorithm(
    Algorithm(
        name="tempflow_grpo",
        loss="tempflow_grpo",
        description="TempFlow-GRPO: steps weighted by the noise that they add",
    )
)


@register_diffusion_loss("tempflow_grpo")
class TempFlowGRPOLoss(FlowGRPOLoss):
    """Flow-GRPO's clipped objective, weighted by the standard deviation of each step's noise."""

    gaussian_steps = True
    required_model_output_keys = ("log_probs", "std_dev_t")
    required_data_keys = ("old_log_probs", "advantages", "sqrt_dt")
    defaults = {**FlowGRPOLoss.defaults, "extra": {"weight_scale": 2.25}}
    extra_ranges = {"weight_scale": Range(above=0)}

    @classmethod
    def compute_loss(
        cls,
        *,
        config: "DiffusionActorConfig",
        std_dev_t: torch.Tensor,
        sqrt_dt: torch.Tensor,
        rollout_is_weights: torch.Tensor | None = None,
        **clipped: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean(c·s·√(-dt)·max(-Aρ, -A·clip(ρ, 1-ε_low, 1+ε_high)))``.

        std_dev_t is (B, 1, ...) or scalar, sqrt_dt (B,) or scalar, and the rest as in Flow-GRPO's loss.
        """
        rows = len(clipped["log_prob"])
        weight = cls.settings(config).weight_scale * per_row(std_dev_t, rows) * per_row(sqrt_dt, rows)
        weights = weigh_steps(weight, rollout_is_weights)
        loss, metrics = super().compute_loss(config=config, rollout_is_weights=weights, **clipped)
        return loss, metrics | {"step_weight": weight.detach().mean()}
