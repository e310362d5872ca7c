"""Text in a sample: GRPO on tokens (UniGRPO, arXiv 2603.23500), or one ratio for a text (GSPO, arXiv 2507.18071).

A sample has one advantage for all that it is made of: these losses see the same one as that of its denoising steps.
"""

import torch

from verl_omni.algorithms.base import DiffusionLossResult

# How far below and above 1 a ratio may be. A text's is a mean over its tokens, and near 1: the range of GSPO's authors.
CLIP = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}


class TokenLoss:
    """Called with what the language model gave, (N, K), and the micro-batch: N texts of up to K tokens."""

    def __init__(self, loss: str, clip_ratio: float | None, adv_clip_max: float):
        """`clip_ratio` None: the loss's own."""
        self.loss, self.adv_clip_max = loss, adv_clip_max
        self.clip = CLIP[loss] if clip_ratio is None else (clip_ratio, clip_ratio)

    def __call__(self, model_output: dict[str, torch.Tensor], data: dict[str, torch.Tensor]) -> DiffusionLossResult:
        log_prob, old, mask = model_output["log_probs"], data["text_old_log_probs"], data["text_mask"]
        advantages = data["advantages"].clamp(-self.adv_clip_max, self.adv_clip_max)
        loss, metrics = token_objective(self.loss, log_prob, old, mask, advantages, self.clip)
        off = ((log_prob.detach() - data["text_log_probs"]).exp() - 1).abs() * mask
        metrics |= {
            "loss": loss.detach(),
            "entropy": mean_of_texts(model_output["entropy"], mask).mean(),
            "length": mask.sum(1).float().mean(),
            "rollout_ratio_max_dev": off.max(),
            "rollout_ratio_mean_dev": mean_of_texts(off, mask).mean(),
        }
        return DiffusionLossResult(loss, metrics)


def token_objective(
    kind: str,
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    clip: tuple[float, float],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """``mean_i mean_k max(-A ρ, -A clip(ρ, 1-δ, 1+ε))``, and metrics. `clip` is (δ, ε).

    grpo: ``ρ_ik = exp(log_prob_ik - old_log_prob_ik)``, each token's own. gspo: ``ρ_i = exp(mean_k ...)``, the text's.
    `mask` (N, K) is true for the tokens that a text has; `advantages` are (N,).
    """
    change = (log_prob - old_log_prob).masked_fill(~mask, 0.0)
    if kind == "gspo":
        change, mask = mean_of_texts(change, mask)[:, None], torch.ones_like(mask[:, :1])
    ratio, advantages = change.exp(), advantages[:, None]
    below, above = clip
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - below, 1 + above))
    ratio = ratio.detach()
    clipped = ((1 - ratio > below) | (ratio - 1 > above)).float()
    return mean_of_texts(loss, mask).mean(), {
        "clipfrac": mean_of_texts(clipped, mask).mean(),
        "ratio_mean": mean_of_texts(ratio, mask).mean(),
        "ratio_max_dev": ((ratio - 1).abs() * mask).max(),
    }


def mean_of_texts(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(N,): the mean over each text's own tokens."""
    return (values * mask).sum(1) / mask.sum(1)
