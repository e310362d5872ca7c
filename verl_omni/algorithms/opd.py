"""On-policy distillation: the student's own states, and what a frozen teacher of the same family would do there.

The loss is the KL divergence between the two Gaussian steps, of student and teacher, on every stochastic step that the
student took. No reward is in it; rewards are still computed, and shown. `actor.teacher.path` names the teacher, or one
for each data_source. Beside the loss of another policy-gradient algorithm the same distance is added with the weight
`actor.teacher.coef`.

`opd_forward` compares velocities on the student's own images, noised again: no step need be stochastic, and an image is
trained at as few noise levels as one likes.
"""

from typing import Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn, divergence, per_part
from verl_omni.algorithms.forward_process import velocity_distance
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss

register_algorithm(
    Algorithm(
        name="opd",
        loss="opd",
        description="On-policy distillation: the student's own steps towards a frozen teacher's",
    )
)
register_algorithm(
    Algorithm(
        name="opd_forward",
        loss="opd_forward",
        trainer_type="direct_preference",
        description="The same on the forward process: towards a frozen teacher's velocities on the student's images",
    )
)


@register_diffusion_loss("opd")
class OPDLoss(DiffusionLossFn):
    """KL divergence from the teacher's reverse steps."""

    required_model_output_keys = ("prev_sample_mean", "std_dev_t")
    required_data_keys = ("teacher_prev_sample_mean", "sqrt_dt")
    defaults = {}

    @classmethod
    def compute_loss(
        cls,
        *,
        prev_sample_mean: torch.Tensor,
        teacher_prev_sample_mean: torch.Tensor,
        std_dev_t: torch.Tensor,
        sqrt_dt: torch.Tensor,
        log_prob_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean(mean((μ - μ_T)²)/(2s²·(-dt)))``. Means are (B, ...), std_dev_t (B, 1, ...), sqrt_dt (B,) or scalar.

        ``log_prob_weights`` (B, N) are those of a log-probability's mean, and so the inner mean's.
        """
        rows = len(prev_sample_mean)
        std = per_part(std_dev_t, rows) * per_part(sqrt_dt, rows)
        loss = divergence(prev_sample_mean - teacher_prev_sample_mean.detach(), std, log_prob_weights).mean()
        return loss, {"teacher_kl": loss.detach()}


@register_diffusion_loss("opd_forward")
class ForwardOPDLoss(DiffusionLossFn):
    """Squared distance from the teacher's velocities."""

    required_model_output_keys = ("velocity",)
    required_data_keys = ("clean_latents", "noise", "teacher_velocity")
    defaults = {}

    @classmethod
    def compute_loss(
        cls, *, velocity: torch.Tensor, teacher_velocity: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean(mean((v - v_T)²))``. Velocities are (B, ...)."""
        loss = velocity_distance(velocity, teacher_velocity).mean()
        return loss, {"teacher_distance": loss.detach()}
