"""Advantage-Weighted Matching (arXiv 2509.25050): the flow-matching error as log-likelihood in a clipped objective.

`diffusion_loss.extra`:
    weighting     of the error e over noise levels t: uniform, t, t2 (t²), huber, t·(√(e + 1e-10) - 1e-5), or ghuber,
                  4t·((e + 1e-10)^¼ - (1e-10)^¼), with which its authors train SD3.5 (uniform)
    kl_beta       weight of the distance to the reference (0; 0 needs no reference)
    ema_kl_beta   weight of the distance to a moving average of the policy, which follows it as
                  `algorithm.old_policy_decay_schedule` says (0; 0 needs none)
"""

from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn
from verl_omni.algorithms.flow_grpo import FlowGRPOLoss, clipped_objective, log_prob_metrics
from verl_omni.algorithms.forward_process import add_advantages, matching_error, velocity_distance
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss
from verl_omni.config.knob import Range
from verl_omni.utils.suggest import unknown

if TYPE_CHECKING:
    from verl_omni.config import DiffusionActorConfig

register_algorithm(
    Algorithm(
        name="awm",
        loss="awm",
        trainer_type="direct_preference",
        algorithm={"old_policy_decay_schedule": "linear_to_0_3"},
        description="AWM: advantage-weighted flow matching with a clipped ratio",
    )
)

# weight of a matching error e at noise level t
WEIGHTINGS = {
    "uniform": lambda e, t: e,
    "t": lambda e, t: t * e,
    "t2": lambda e, t: t**2 * e,
    "huber": lambda e, t: t * ((e + 1e-10).sqrt() - 1e-5),
    "ghuber": lambda e, t: 4 * t * ((e + 1e-10) ** 0.25 - 1e-10**0.25),
}
# setting -> the velocity whose distance it weighs
_ANCHORS = {"kl_beta": "ref_velocity", "ema_kl_beta": "ema_velocity"}


@register_diffusion_loss("awm")
class AWMLoss(DiffusionLossFn):
    """PPO's clipped objective on the negative matching error."""

    required_model_output_keys = ("velocity",)
    required_data_keys = ("clean_latents", "noise", "sigma", "advantages", "old_velocity")
    defaults = {**FlowGRPOLoss.defaults, "extra": {"weighting": "uniform", "kl_beta": 0.0, "ema_kl_beta": 0.0}}
    extra_ranges = {
        "weighting": Range(choices=tuple(WEIGHTINGS)),
        "kl_beta": Range(least=0),
        "ema_kl_beta": Range(least=0),
    }

    @classmethod
    def data_keys(cls, config: "DiffusionActorConfig") -> tuple[str, ...]:
        settings = cls.settings(config)
        return cls.required_data_keys + tuple(key for name, key in _ANCHORS.items() if getattr(settings, name))

    @classmethod
    def compute_loss(
        cls,
        *,
        velocity: torch.Tensor,
        old_velocity: torch.Tensor,
        clean_latents: torch.Tensor,
        noise: torch.Tensor,
        sigma: torch.Tensor,
        advantages: torch.Tensor,
        config: "DiffusionActorConfig",
        ref_velocity: torch.Tensor | None = None,
        ema_velocity: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``ℓ = -weighted mean((v - (ε - x0))²)``, ``ρ = exp(ℓ - ℓ_old)``, clipped as in PPO, plus the two distances.

        Velocities and latents are (B, ...), sigma and advantages (B,).
        """
        settings = cls.settings(config)
        if settings.weighting not in WEIGHTINGS:
            raise ValueError(unknown("diffusion_loss.extra.weighting", settings.weighting, WEIGHTINGS))
        weigh = WEIGHTINGS[settings.weighting]
        log_prob = -weigh(matching_error(velocity, clean_latents, noise), sigma)
        old_log_prob = -weigh(matching_error(old_velocity.detach(), clean_latents, noise), sigma)
        loss, metrics = clipped_objective(torch.exp(log_prob - old_log_prob), advantages, settings)
        metrics |= log_prob_metrics(old_log_prob, log_prob)
        anchors = {"kl_beta": ref_velocity, "ema_kl_beta": ema_velocity}
        for name, anchor in anchors.items():
            weight = getattr(settings, name)
            if not weight:
                continue
            if anchor is None:
                raise ValueError(f"diffusion_loss.extra.{name}={weight} needs {_ANCHORS[name]} in the batch")
            distance = velocity_distance(velocity, anchor)
            loss = loss + weight * distance
            metrics[name.replace("beta", "loss")] = distance.detach().mean()
        return loss.mean(), metrics

    prepare_actor_batch = staticmethod(add_advantages)
