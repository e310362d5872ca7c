"""DGPO (arXiv 2510.08425): a group's preference as a whole, on the forward process, with ODE rollouts.

All images of a prompt are noised with one ε to one t. How much better than the reference the model denoises the good
images, and how much worse the bad ones, is one number of the group, s. Groups that the model does not order yet count
more: the weight is the sigmoid of s.

`diffusion_loss.extra`:
    beta     β, how soon a group that is in order counts less (100)
    anchor   what s compares with: the reference, or ema, a moving average of the policy, which follows it as
             `algorithm.old_policy_decay_schedule` says: constant_0_9, where it is left out (reference)
"""

from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn
from verl_omni.algorithms.flow_grpo import clamp_advantages, ratio_metrics
from verl_omni.algorithms.forward_process import add_advantages, group_share, matching_error
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss
from verl_omni.config.knob import Range

if TYPE_CHECKING:
    from verl import DataProto

    from verl_omni.config import DiffusionActorConfig

register_algorithm(
    Algorithm(
        name="dgpo",
        loss="dgpo",
        trainer_type="direct_preference",
        algorithm={"old_policy_decay_schedule": "constant_0_9"},
        description="DGPO: group preference on the forward process, with ODE rollouts",
    )
)

_ANCHORS = {"reference": "ref_velocity", "ema": "ema_velocity"}


@register_diffusion_loss("dgpo")
class DGPOLoss(DiffusionLossFn):
    """Advantage-weighted matching, where a group counts as far as the model does not order it yet."""

    required_model_output_keys = ("velocity",)
    required_data_keys = ("clean_latents", "noise", "advantages", "old_velocity", "group_share", "group_sums")
    by_group = True
    defaults = {
        "clip_ratio": 0.01,
        "clip_ratio_low": None,
        "clip_ratio_high": None,
        "adv_clip_max": 5.0,
        "extra": {"beta": 100.0, "anchor": "reference"},
    }
    extra_ranges = {"beta": Range(above=0), "anchor": Range(choices=tuple(_ANCHORS))}

    @classmethod
    def data_keys(cls, config: "DiffusionActorConfig") -> tuple[str, ...]:
        return (*cls.required_data_keys, _ANCHORS[cls.settings(config).anchor])

    def group_terms(self, *, config, model_output, data) -> torch.Tensor:
        """``β/|G|·A·(d - d_ref)``, whose sum over a group is s."""
        settings = self.settings(config)
        anchor = data[_ANCHORS[settings.anchor]]
        gain = self._error(model_output["velocity"], data) - self._error(anchor, data)
        advantages = clamp_advantages(data["advantages"], settings)
        return (settings.beta * data["group_share"] * advantages * gain)[:, None]

    @staticmethod
    def _error(velocity: torch.Tensor, data: Any) -> torch.Tensor:
        return matching_error(velocity, data["clean_latents"], data["noise"])

    @classmethod
    def compute_loss(
        cls,
        *,
        velocity: torch.Tensor,
        old_velocity: torch.Tensor,
        clean_latents: torch.Tensor,
        noise: torch.Tensor,
        advantages: torch.Tensor,
        group_sums: torch.Tensor,
        config: "DiffusionActorConfig",
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean(σ(s)·A·d)``, ``d = mean((v - (ε - x0))²)``.

        There is no gradient where the ratio ``exp(d_old - d)`` has left its bounds in the direction of A.

        Velocities and latents are (B, ...), advantages (B,), and ``group_sums`` (B, 1) is s.
        """
        settings = cls.settings(config)
        advantages = clamp_advantages(advantages, settings)
        error = matching_error(velocity, clean_latents, noise)
        ratio = torch.exp(matching_error(old_velocity.detach(), clean_latents, noise) - error).detach()
        low = 1 - (settings.clip_ratio if settings.clip_ratio_low is None else settings.clip_ratio_low)
        high = 1 + (settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high)
        lower, higher = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
        error = torch.where(lower | higher, error.detach(), error)
        weight = group_sums[:, 0].detach().to(advantages).sigmoid()
        metrics = {
            "pg_clipfrac": (lower | higher).float().mean(),
            "pg_clipfrac_lower": lower.float().mean(),
            "pg_clipfrac_higher": higher.float().mean(),
            "group_weight": weight.mean(),
            **ratio_metrics(ratio),
        }
        return (weight * advantages * error).mean(), metrics

    @staticmethod
    def prepare_actor_batch(batch: "DataProto", reward_tensor: torch.Tensor, config: Any) -> "DataProto":
        """Advantages, and how much of its group a sample is: 1/|G|."""
        batch = add_advantages(batch, reward_tensor, config)
        batch.batch["group_share"] = group_share(batch.non_tensor_batch["uid"])
        return batch
