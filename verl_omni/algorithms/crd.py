"""CRD, centred reward distillation (arXiv 2603.14128): the model's implicit reward is fitted to its group's advantages.

How much better than the policy that drew it a sample is denoised is the model's own reward of it, r. Only differences
within a group mean anything: r and A are both taken from their group's mean, and the distance between them is the loss.
All images of a prompt are noised with one ε to one t.

`diffusion_loss.extra`:
    beta          β, the scale of the implicit reward: the larger, the closer the model stays to the old policy (100)
    temperature   T of the two-sided form, whose means are weighted by softmax(A/T) and softmax(-A/T), so that samples
                  are compared with the best and with the worst of their group; 0 takes the plain mean (0)
"""

from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn
from verl_omni.algorithms.flow_grpo import clamp_advantages, ratio_metrics
from verl_omni.algorithms.forward_process import add_advantages, group_numbers, matching_error
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss
from verl_omni.config.knob import Range

if TYPE_CHECKING:
    from verl import DataProto

    from verl_omni.config import DiffusionActorConfig

register_algorithm(
    Algorithm(
        name="crd",
        loss="crd",
        trainer_type="direct_preference",
        description="CRD: the implicit reward is fitted to the advantages within each group",
    )
)


@register_diffusion_loss("crd")
class CRDLoss(DiffusionLossFn):
    """Squared distance between the centred implicit reward and the centred advantage."""

    required_model_output_keys = ("velocity",)
    required_data_keys = ("clean_latents", "noise", "advantages", "old_velocity", "centre", "targets", "group_sums")
    by_group = True
    defaults = {"adv_clip_max": 5.0, "extra": {"beta": 100.0, "temperature": 0.0}}
    extra_ranges = {"beta": Range(above=0), "temperature": Range(least=0)}

    def group_terms(self, *, config, model_output, data) -> torch.Tensor:
        """``w·r``, whose sum over a group is the mean that r is taken from, of each side."""
        reward = implicit_reward(model_output["velocity"], data["old_velocity"], data["clean_latents"], data["noise"])
        return data["centre"] * reward[:, None]

    @classmethod
    def compute_loss(
        cls,
        *,
        velocity: torch.Tensor,
        old_velocity: torch.Tensor,
        clean_latents: torch.Tensor,
        noise: torch.Tensor,
        targets: torch.Tensor,
        group_sums: torch.Tensor,
        config: "DiffusionActorConfig",
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean((β·(r - mean_G r) - (A - mean_G A))²)``, ``r = -mean((v - (ε-x0))² - (v_old - (ε-x0))²)``.

        Velocities and latents are (B, ...). ``targets``, the centred advantages, and ``group_sums``, the means of
        r, have a column for each kind of mean: (B, M). The loss is the mean over both. No gradient goes through a
        group's mean.
        """
        reward = implicit_reward(velocity, old_velocity, clean_latents, noise)
        fitted = cls.settings(config).beta * (reward[:, None] - group_sums.detach().to(targets))
        metrics = {
            "implicit_reward_abs": fitted.detach().abs().mean(),
            "implicit_error": (fitted.detach() - targets).abs().mean(),
            **ratio_metrics(torch.exp(reward)),
        }
        return ((fitted - targets) ** 2).mean(), metrics

    @classmethod
    def prepare_actor_batch(cls, batch: "DataProto", reward_tensor: torch.Tensor, config: Any) -> "DataProto":
        """Advantages, the weights of the means of each group, and the centred advantages."""
        batch = add_advantages(batch, reward_tensor, config)
        settings = cls.settings(config.actor_rollout_ref.actor)
        advantages = clamp_advantages(batch.batch["advantages"], settings)
        centre, targets = centred(advantages, group_numbers(batch.non_tensor_batch["uid"]), settings.temperature)
        batch.batch["centre"], batch.batch["targets"] = centre, targets
        return batch


def implicit_reward(
    velocity: torch.Tensor, old_velocity: torch.Tensor, clean_latents: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """How much better than the old policy the model denoises each row: (B,)."""
    old = matching_error(old_velocity.detach(), clean_latents, noise)
    return old - matching_error(velocity, clean_latents, noise)


def centred(advantages: torch.Tensor, group: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights of each sample in the means of its group, its advantage minus that mean), (B, M) each."""
    exact = advantages.double()
    sides = [exact / temperature, -exact / temperature] if temperature else [torch.zeros_like(exact)]
    weights, targets = (exact.new_zeros(len(exact), len(sides)) for _ in range(2))
    for number in group.unique().tolist():
        rows = group == number
        for side, logits in enumerate(sides):
            weights[rows, side] = logits[rows].softmax(dim=0)
            targets[rows, side] = exact[rows] - weights[rows, side] @ exact[rows]
    return weights.to(advantages), targets.to(advantages)
