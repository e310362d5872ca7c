"""TempFlow-GRPO (arXiv 2508.04324): Flow-GRPO whose steps count by the noise that they add.

An early step, which adds much noise, can change the image much; a late one hardly can, and yet has as steep a
log-probability. The clipped loss of a step is weighted by ``c·s·√(-dt)``, the standard deviation of its noise.

`diffusion_loss.extra`:
    weight_scale   c, which makes the weights near 1 on average (2.25)
"""

from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn, DiffusionLossResult, check_rows, per_row, weighted_mean
from verl_omni.algorithms.flow_grpo import FlowGRPOLoss, clipped_objective, log_prob_metrics
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
class TempFlowGRPOLoss(DiffusionLossFn):
    """Flow-GRPO's clipped objective, weighted by the standard deviation of each step's noise."""

    required_model_output_keys = ("log_probs", "std_dev_t")
    required_data_keys = ("old_log_probs", "advantages", "sqrt_dt")
    defaults = {**FlowGRPOLoss.defaults, "extra": {"weight_scale": 2.25}}
    extra_ranges = {"weight_scale": Range(above=0)}

    @classmethod
    def compute_loss(
        cls,
        *,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        config: "DiffusionActorConfig",
        std_dev_t: torch.Tensor,
        sqrt_dt: torch.Tensor,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean(c·s·√(-dt)·max(-Aρ, -A·clip(ρ, 1-ε_low, 1+ε_high)))``.

        Log-probabilities and advantages are (B,), std_dev_t (B, 1, ...) or scalar, sqrt_dt (B,) or scalar.
        """
        check_rows(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, weights=rollout_is_weights)
        settings, rows = cls.settings(config), len(log_prob)
        weight = settings.weight_scale * per_row(std_dev_t, rows) * per_row(sqrt_dt, rows)
        loss, metrics = clipped_objective(torch.exp(log_prob - old_log_prob), advantages, settings)
        metrics |= log_prob_metrics(old_log_prob, log_prob) | {"step_weight": weight.detach().mean()}
        return weighted_mean(loss * weight.detach(), rollout_is_weights), metrics

    def __call__(self, *, config, model_output, data) -> DiffusionLossResult:
        loss, metrics = self.compute_loss(
            old_log_prob=data["old_log_probs"],
            log_prob=model_output["log_probs"],
            advantages=data["advantages"],
            config=config,
            std_dev_t=model_output["std_dev_t"],
            sqrt_dt=data["sqrt_dt"],
            rollout_is_weights=data.get("rollout_is_weights", None),
        )
        return DiffusionLossResult(loss=loss, metrics=metrics)
