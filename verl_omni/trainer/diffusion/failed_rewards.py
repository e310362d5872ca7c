"""Samples whose reward failed leave their group; what is learned from the others is as if they had not been drawn."""

from collections import Counter

import torch
from tqdm import tqdm
from verl.protocol import DataProto

from verl_omni.utils.errors import RunError


def scored_rows(batch: DataProto) -> torch.Tensor:
    """(B,) which rows are learned from: those with a score, in groups where at least two have one."""
    scored = ~batch.batch["sample_level_rewards"].isnan()
    if not scored.all():
        uids = batch.non_tensor_batch["uid"]
        counts = Counter(uid for uid, is_scored in zip(uids, scored.tolist(), strict=True) if is_scored)
        scored &= torch.tensor([counts[uid] > 1 for uid in uids])
    return scored


def scored_part(batch: DataProto, step: int) -> tuple[torch.Tensor, DataProto]:
    """(which rows are learned from, those rows). What is left out is said on the console."""
    kept = scored_rows(batch)
    batch.meta_info["failed"] = int(batch.batch["sample_level_rewards"].isnan().sum())
    if kept.all():
        return kept, batch
    why = next(reason for reason in batch.non_tensor_batch["reward_failure"] if reason is not None)
    if not kept.any():
        raise RunError(f"no prompt of step {step} has two images with a score: {why}")
    tqdm.write(
        f"step {step}: {batch.meta_info['failed']} of {len(batch)} images have no score, {int(kept.sum())} are learned "
        f"from: {why}"
    )
    return kept, batch[kept.nonzero()[:, 0]]


def with_gaps(
    whole: DataProto, part: DataProto, kept: torch.Tensor, mini_batches: int, ranks: int
) -> tuple[DataProto, int]:
    """(all rows in training order, where those that are left out count nothing; mini-batches with anything in them)."""
    rows, share, mini_batches = rows_and_shares(kept, mini_batches, ranks)
    for name in set(part.batch.keys()) - set(whole.batch.keys()):  # advantages, weights, ...
        value = part.batch[name]
        whole.batch[name] = value.new_zeros(len(whole), *value.shape[1:])
        whole.batch[name][kept] = value
    whole.batch["share"] = torch.zeros(len(whole), dtype=torch.float64)
    whole.batch["share"][rows] = share
    return whole[rows], mini_batches


def rows_and_shares(kept: torch.Tensor, mini_batches: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What to train on where some rows are left out: (rows, the share of each in its rank's mean, mini-batches).

    Rows are in training order: contiguous chunks of ranks, each cut into mini-batches. A row that is left out stays
    with share 0, so that ranks have equally many; a mini-batch of which nothing is left goes.
    """
    by_mini = kept.reshape(ranks, mini_batches, -1)
    count = by_mini.sum(dim=(0, 2), keepdim=True)
    share = by_mini * (ranks / count.clamp_min(1).double())
    alive = count[0, :, 0] > 0
    rows = torch.arange(len(kept)).reshape(by_mini.shape)[:, alive].reshape(-1)
    return rows, share[:, alive].reshape(-1), int(alive.sum())
