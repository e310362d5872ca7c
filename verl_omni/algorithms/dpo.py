"""Diffusion-DPO (arXiv 2311.12908) on flow matching, offline or online.

Rows come in pairs: two adjacent rows are the chosen and the rejected image of one prompt, noised with one ε to one t.
Online, a prompt's best image is preferred to its worst; a group of equal scores makes no pair.

`diffusion_loss.extra`:
    beta   strength of the pull to the reference (2000)
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from verl_omni.algorithms.advantages import checked_rewards
from verl_omni.algorithms.base import DiffusionLossFn
from verl_omni.algorithms.forward_process import matching_error
from verl_omni.algorithms.registry import Algorithm, register_algorithm, register_diffusion_loss
from verl_omni.config.knob import Range

if TYPE_CHECKING:
    from verl import DataProto

    from verl_omni.config import DiffusionActorConfig

register_algorithm(
    Algorithm(
        name="dpo",
        loss="dpo",
        trainer_type="direct_preference",
        algorithm={"paired_preference": True},
        description="Diffusion-DPO: chosen against rejected images, offline or best against worst online",
    )
)


@register_diffusion_loss("dpo")
class DPOLoss(DiffusionLossFn):
    """Preference between two images, read off how much better than the reference the model denoises each."""

    required_model_output_keys = ("velocity",)
    required_data_keys = ("clean_latents", "noise", "sigma", "preference", "ref_velocity")
    rows_per_unit = 2
    defaults = {"extra": {"beta": 2000.0}}
    extra_ranges = {"beta": Range(above=0)}

    @classmethod
    def compute_loss(
        cls,
        *,
        velocity: torch.Tensor,
        ref_velocity: torch.Tensor,
        clean_latents: torch.Tensor,
        noise: torch.Tensor,
        preference: torch.Tensor,
        config: "DiffusionActorConfig",
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``-log σ(z)``, ``z = -½β[(e_w - e_w_ref) - (e_l - e_l_ref)]``, ``e = mean((v - (ε - x0))²)``.

        ``preference`` (B,) is +1 for the chosen and -1 for the rejected row of each pair. The mean is over pairs.
        """
        beta = cls.settings(config).beta
        gain = (
            matching_error(velocity, clean_latents, noise) - matching_error(ref_velocity, clean_latents, noise).detach()
        )
        z = -0.5 * beta * (preference * gain).unflatten(0, (-1, 2)).sum(dim=1)
        loss = -F.logsigmoid(z).mean()
        metrics = {"implicit_accuracy": (z > 0).float().mean(), "implicit_margin": z.detach().mean()}
        return loss, metrics

    def validate_inputs(self, *, loss_name, model_output, data) -> None:
        super().validate_inputs(loss_name=loss_name, model_output=model_output, data=data)
        preference, sigma = data["preference"], data["sigma"]
        if len(preference) % 2:
            raise ValueError(f"{len(preference)} rows are no whole number of pairs: keep chosen and rejected together")
        pairs = preference.reshape(-1, 2)
        if not bool(((pairs.sum(dim=1) == 0) & (pairs.abs() == 1).all(dim=1)).all()):
            raise ValueError("each two adjacent rows are a pair: expected preference +1 in one and -1 in the other")
        if not bool((sigma.reshape(-1, 2).diff(dim=1) == 0).all()):
            raise ValueError("the two images of a pair are noised alike: expected one sigma (and one noise) per pair")

    @staticmethod
    def prepare_actor_batch(batch: "DataProto", reward_tensor: torch.Tensor, config: Any) -> "DataProto":
        """The best and the worst image of each prompt, adjacent; ``batch.meta_info["metrics"]`` says how many pairs."""
        uids = batch.non_tensor_batch["uid"]
        scores = checked_rewards(reward_tensor.reshape(len(reward_tensor)), uids).tolist()
        rows, groups = [], {}
        for row, uid in enumerate(uids):
            groups.setdefault(uid, []).append(row)
        for group in groups.values():
            best, worst = max(group, key=scores.__getitem__), min(group, key=scores.__getitem__)
            if scores[best] > scores[worst]:
                rows += [best, worst]
        pairs = len(rows) // 2
        chosen = batch.select_idxs(np.array(rows, dtype=np.int64))
        chosen.batch["preference"] = torch.tensor([1.0, -1.0]).repeat(pairs)
        metrics = {"dpo/pairs": pairs, "dpo/groups_without_pair": len(groups) - pairs}
        chosen.meta_info = {**chosen.meta_info, "metrics": {**chosen.meta_info.get("metrics", {}), **metrics}}
        return chosen
