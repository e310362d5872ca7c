"""Direct reward gradients (DRaFT-K, arXiv 2309.17400): up the gradient of the reward itself.

The images of a rollout are noised again to the level at which its last K steps start, the model takes these steps, and
the reward of where they end is differentiated through the VAE and all K calls of the model. No group, no advantage and
no old policy is in it. The reward has to be differentiable (`verl_omni.rewards.differentiable`).

`diffusion_loss.extra`:
    steps     K (1)
    kl_beta   weight of the distance to the reference's velocities at that level (0; 0 needs no reference)
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn
from verl_omni.algorithms.forward_process import velocity_distance
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss
from verl_omni.config.knob import Range

if TYPE_CHECKING:
    from verl_omni.config import DiffusionActorConfig

register_algorithm(
    Algorithm(
        name="draft",
        loss="draft",
        trainer_type="direct_preference",
        algorithm={"timestep_distribution": "last", "timestep_fraction": 0.01},  # the last level alone
        description="Direct reward gradients through the last steps, for differentiable rewards only",
    )
)


@register_diffusion_loss("draft")
class DraftLoss(DiffusionLossFn):
    """Minus the reward of what the model predicts."""

    required_model_output_keys = ("velocity", "predicted_reward")
    required_data_keys = ("clean_latents", "noise", "sigma")
    defaults = {"extra": {"kl_beta": 0.0, "steps": 1}}
    extra_ranges = {"kl_beta": Range(least=0), "steps": Range(least=1)}

    @classmethod
    def chained_steps(cls, config: "DiffusionActorConfig") -> int:
        return cls.settings(config).steps

    @classmethod
    def check_extra(cls, extra: Mapping[str, Any], where: str) -> None:
        super().check_extra(extra, where)
        steps = extra.get("steps", 1)
        if not isinstance(steps, int) or isinstance(steps, bool):
            raise ValueError(f"{where}.steps={steps}: expected a whole number")

    @classmethod
    def data_keys(cls, config: "DiffusionActorConfig") -> tuple[str, ...]:
        return cls.required_data_keys + (("ref_velocity",) if cls.settings(config).kl_beta else ())

    @classmethod
    def compute_loss(
        cls,
        *,
        predicted_reward: torch.Tensor,
        velocity: torch.Tensor,
        config: "DiffusionActorConfig",
        ref_velocity: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean(-R(decode(x̂0)) + kl_beta·mean((v - v_ref)²))``. Rewards are (B,), velocities (B, ...)."""
        weight = cls.settings(config).kl_beta
        loss, metrics = -predicted_reward, {"predicted_reward": predicted_reward.detach().mean()}
        if weight:
            if ref_velocity is None:
                raise ValueError(f"diffusion_loss.extra.kl_beta={weight} needs ref_velocity in the batch")
            distance = velocity_distance(velocity, ref_velocity)
            loss = loss + weight * distance
            metrics["kl_loss"] = distance.detach().mean()
        return loss.mean(), metrics
