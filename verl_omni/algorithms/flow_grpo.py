"""Flow-GRPO (arXiv 2505.05470): PPO's clipped objective on the log-probabilities of single denoising steps.

Its fast variant is settings: `rollout.algo.sde_window_size=2` trains two steps of each image, and
`rollout.algo.sde_window_per_group=true` lets them differ from prompt to prompt.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn, check_rows, weighted_mean
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss

if TYPE_CHECKING:
    from verl_omni.config import DiffusionActorConfig

register_algorithm(
    Algorithm(
        name="flow_grpo",
        rollout={"sde_type": "sde", "noise_level": 0.7},
        description="Flow-GRPO: clipped policy gradient on stochastic denoising steps",
    )
)


@register_diffusion_loss("flow_grpo")
class FlowGRPOLoss(DiffusionLossFn):
    """Flow-GRPO clipped policy objective."""

    required_model_output_keys = ("log_probs",)
    required_data_keys = ("old_log_probs", "advantages")

    @classmethod
    def compute_loss(
        cls,
        *,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        config: "DiffusionActorConfig",
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean(max(-Aρ, -A·clip(ρ, 1-ε_low, 1+ε_high)))`` with ``ρ = exp(log_prob - old_log_prob)``.

        All tensors are (B,): one value for each (sample, step) pair. ``rollout_is_weights`` scale a pair's loss.
        """
        check_rows(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, weights=rollout_is_weights)
        ratio = torch.exp(log_prob - old_log_prob)
        loss, metrics = clipped_objective(ratio, advantages, cls.settings(config))
        return weighted_mean(loss, rollout_is_weights), metrics | log_prob_metrics(old_log_prob, log_prob)


def weigh_steps(weight: torch.Tensor, rollout_is_weights: torch.Tensor | None) -> torch.Tensor:
    """The weights of pairs whose steps have a weight of their own."""
    return weight.detach() if rollout_is_weights is None else weight.detach() * rollout_is_weights


def clamp_advantages(advantages: torch.Tensor, settings: SimpleNamespace) -> torch.Tensor:
    return advantages.clamp(-settings.adv_clip_max, settings.adv_clip_max)


def clipped_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, settings: SimpleNamespace
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's pessimistic choice between the ratio and the clipped ratio, row by row, and how often it clips."""
    low = 1 - (settings.clip_ratio if settings.clip_ratio_low is None else settings.clip_ratio_low)
    high = 1 + (settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high)
    advantages = clamp_advantages(advantages, settings)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    ratio = ratio.detach()
    lower, higher = (ratio < low).float().mean(), (ratio > high).float().mean()
    return loss, {
        "pg_clipfrac": lower + higher,
        "pg_clipfrac_lower": lower,
        "pg_clipfrac_higher": higher,
        **ratio_metrics(ratio),
    }


def ratio_metrics(ratio: torch.Tensor) -> dict[str, torch.Tensor]:
    ratio = ratio.detach()
    return {"ratio_mean": ratio.mean(), "ratio_max_dev": (ratio - 1).abs().max()}


def log_prob_metrics(old_log_prob: torch.Tensor, log_prob: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"ppo_kl": (old_log_prob - log_prob).detach().mean()}
