"""KL divergence to the reference policy, added to any policy-gradient loss by `actor.use_kl_loss`."""

from typing import Any

import torch

from verl_omni.algorithms.base import DiffusionLossFn, DiffusionLossResult, per_row, row_mean


class KLLoss(DiffusionLossFn):
    """KL divergence between current and reference reverse-SDE means."""

    required_model_output_keys = ("prev_sample_mean", "std_dev_t")
    required_data_keys = ("ref_prev_sample_mean",)

    @classmethod
    def compute_loss(
        cls, *, prev_sample_mean: torch.Tensor, ref_prev_sample_mean: torch.Tensor, std_dev_t: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``mean((μ-μ_ref)²)/(2s²)``: Flow-GRPO's, a penalty per unit of time, hence without dt. It has a gradient.

        Means are (B, ...), std_dev_t is (B, 1, ...) or scalar.
        """
        squared = row_mean((prev_sample_mean - ref_prev_sample_mean.detach()) ** 2)
        loss = (squared / (2 * per_row(std_dev_t, len(squared)) ** 2)).mean()
        return loss, {"kl_loss": loss.detach()}

    def __call__(self, *, config, model_output, data) -> DiffusionLossResult:
        loss, metrics = self.compute_loss(
            prev_sample_mean=model_output["prev_sample_mean"],
            ref_prev_sample_mean=data["ref_prev_sample_mean"],
            std_dev_t=model_output["std_dev_t"],
        )
        return DiffusionLossResult(loss=loss, metrics=metrics)
