"""Flash-GRPO: one stochastic step a prompt, and steps that pull equally hard wherever it lies.

The gradient of a step's log-probability to the velocity grows with ``√(-dt)/s + s·√(-dt)·(1-σ)/(2σ)``. The clipped loss
is divided by it, and multiplied by the mean over all steps that may be chosen, so that the learning rate keeps its
meaning. With one step trained an image, an update costs a fraction of Flow-GRPO's.
"""

from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn, DiffusionLossResult, check_rows, per_row, weighted_mean
from verl_omni.algorithms.flow_grpo import clipped_objective, log_prob_metrics
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss

if TYPE_CHECKING:
    from verl_omni.config import DiffusionActorConfig

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
class FlashGRPOLoss(DiffusionLossFn):
    """Flow-GRPO's clipped objective, weighted by how weakly a step's log-probability follows the velocity."""

    required_model_output_keys = ("log_probs", "std_dev_t")
    required_data_keys = ("old_log_probs", "advantages", "sqrt_dt", "step_sigma", "schedule")

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
        sigma: torch.Tensor,
        schedule: torch.Tensor,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean(w/mean(w)·max(-Aρ, -A·clip(ρ, 1-ε_low, 1+ε_high)))``.

        Log-probabilities and advantages are (B,), std_dev_t (B, 1, ...) or scalar, sqrt_dt and sigma (B,) or scalar.
        ``schedule`` (B, K, 3) has σ, √(-dt) and s of each of the K steps that may be trained: the mean of w is theirs.
        """
        check_rows(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, weights=rollout_is_weights)
        rows = len(log_prob)
        own = step_weight(*(per_row(value, rows) for value in (sigma, sqrt_dt, std_dev_t)))
        weight = own / step_weight(*schedule.to(own).unbind(dim=2)).mean(dim=1)
        loss, metrics = clipped_objective(torch.exp(log_prob - old_log_prob), advantages, cls.settings(config))
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
            sigma=data["step_sigma"],
            schedule=data["schedule"],
            rollout_is_weights=data.get("rollout_is_weights", None),
        )
        return DiffusionLossResult(loss=loss, metrics=metrics)
