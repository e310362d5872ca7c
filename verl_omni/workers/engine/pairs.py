"""A batch of trajectories as a flat batch of (sample, step) pairs.

Denoising steps are a batch dimension: a mini-batch of B samples with W trained steps is B * W independent pairs, and
any split of them into micro-batches gives the same gradient.
"""

from collections.abc import Iterator

import torch

# What exists once for each step of a sample, (B, W, ...). Everything else exists once for each sample.
STEP_KEYS = (
    "all_timesteps", "old_log_probs", "rollout_log_probs", "advantages", "returns", "rollout_is_weights",
    "old_prev_sample_mean", "ref_prev_sample_mean", "uncond_velocity",
)  # fmt: skip


def pair_indices(data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and step of every pair; `train_steps` (B, K) names the steps where only some are trained."""
    rows, steps = data["all_timesteps"].shape
    if "train_steps" in data:
        chosen = data["train_steps"]
        return torch.arange(rows).repeat_interleave(chosen.shape[1]), chosen.reshape(-1).cpu()
    return torch.arange(rows).repeat_interleave(steps), torch.arange(steps).repeat(rows)


def micro_batches(data: dict[str, torch.Tensor], size: int) -> Iterator[tuple[dict[str, torch.Tensor], float]]:
    """(micro-batch of up to `size` pairs, its share of all pairs).

    A column `share` says each sample's part of the rank's mean. Samples with 0 run only where a rank has nothing else
    to run: every rank takes part in every forward.
    """
    rows, steps = pair_indices(data)
    weights = data["share"].cpu()[rows] * (len(data["share"]) / len(rows)) if "share" in data else None
    for start in range(0, len(rows), size):
        row, step = rows[start : start + size], steps[start : start + size]
        share = len(row) / len(rows)
        if weights is not None:
            weight = weights[start : start + size]
            share, real = weight.sum().item(), weight > 0
            if real.any():
                row, step = row[real], step[real]
        yield take_pairs(data, row, step), share


def take_pairs(data: dict[str, torch.Tensor], rows: torch.Tensor, steps: torch.Tensor) -> dict[str, torch.Tensor]:
    device = data["all_timesteps"].device
    rows, steps = (index.to(device, non_blocking=True) for index in (rows, steps))  # the host runs ahead
    batch = {
        "latents": data["all_latents"][rows, steps][:, None],
        "prev_latents": data["all_latents"][rows, steps + 1],
        "timesteps": data["all_timesteps"][rows, steps][:, None],
    }
    for key, value in data.items():
        if key in STEP_KEYS:
            batch[key] = value[rows, steps]
        elif key not in ("all_latents", "final_latents", "train_steps", "sample_id", "share"):
            batch[key] = value[rows]
    return batch
