"""DiffusionNFT (arXiv 2509.16117): good and bad images train an implicit positive and an implicit negative policy.

Images come from the old policy, which follows the trained one slowly (`algorithm.old_policy_decay_schedule`). There is
no CFG, neither in the rollout nor in training. c below is `diffusion_loss.adv_clip_max`.

`diffusion_loss.extra`:
    beta      β, how far the two implicit policies lie from the old one (1.0; published: 0.1 to 1)
    kl_beta   λ, weight of the distance to the reference (1e-4; 0 needs no reference)
"""

from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn, column, row_mean
from verl_omni.algorithms.forward_process import add_advantages, noised, velocity_distance
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss
from verl_omni.config.knob import Range

if TYPE_CHECKING:
    from verl_omni.config import DiffusionActorConfig

register_algorithm(
    Algorithm(
        name="diffusion_nft",
        loss="diffusion_nft",
        trainer_type="direct_preference",
        supports_cfg=False,
        rollout_policy="old",
        description="DiffusionNFT: reward-weighted contrast of implicit policies on the forward process",
    )
)


@register_diffusion_loss("diffusion_nft")
class DiffusionNFTLoss(DiffusionLossFn):
    """Negative-aware fine-tuning on the forward process."""

    required_model_output_keys = ("velocity",)
    required_data_keys = ("clean_latents", "noise", "sigma", "advantages", "old_velocity")
    defaults = {"adv_clip_max": 5.0, "extra": {"beta": 1.0, "kl_beta": 1e-4}}
    extra_ranges = {"beta": Range(above=0), "kl_beta": Range(least=0)}

    @classmethod
    def data_keys(cls, config: "DiffusionActorConfig") -> tuple[str, ...]:
        return cls.required_data_keys + (("ref_velocity",) if cls.settings(config).kl_beta else ())

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
        levels: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean((r·L⁺ + (1-r)·L⁻)/β·c) + λ·mean((v - v_ref)²)`` with ``r = clamp(½A/c + ½, 0, 1)``.

        ``v⁺ = βv + (1-β)v_old``, ``v⁻ = (1+β)v_old - βv``, and L± is the error of ``x̂0± = x_t - t·v±``, normalised by
        its own size. Velocities and latents are (B, ...), sigma and advantages (B,). ``levels`` (B, N) stand for sigma
        where parts of a sample have noise levels of their own.
        """
        settings = cls.settings(config)
        beta, c, old = settings.beta, settings.adv_clip_max, old_velocity.detach()
        r = (0.5 * advantages / c + 0.5).clamp(0, 1)
        t = column(sigma if levels is None else levels, clean_latents)
        x_t = noised(clean_latents, noise, sigma if levels is None else levels)
        # As steps from the old policy: where the two agree, both are it to the last bit, and A = 0 has no gradient.
        positive = _normalised_error(x_t - t * old.lerp(velocity, beta), clean_latents)
        negative = _normalised_error(x_t - t * old.lerp(velocity, -beta), clean_latents)
        policy_loss = (r * positive + (1 - r) * negative) / beta * c
        metrics = {
            "nft_policy_loss": policy_loss.detach().mean(),
            "nft_reward_prob": r.mean(),
            "old_distance": velocity_distance(velocity.detach(), old).mean(),
        }
        if not settings.kl_beta:
            return policy_loss.mean(), metrics
        if ref_velocity is None:
            raise ValueError(f"diffusion_loss.extra.kl_beta={settings.kl_beta} needs ref_velocity in the batch")
        kl = velocity_distance(velocity, ref_velocity)
        return (policy_loss + settings.kl_beta * kl).mean(), metrics | {"kl_loss": kl.detach().mean()}

    prepare_actor_batch = staticmethod(add_advantages)


def _normalised_error(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``mean((x̂0 - x0)²/w)``, ``w = mean|x̂0 - x0|`` in float64, without gradient, at least 1e-5: (B,)."""
    size = row_mean((predicted.detach().double() - target.double()).abs()).clamp_min(1e-5)
    return row_mean((predicted - target) ** 2) / size.to(predicted.dtype)
