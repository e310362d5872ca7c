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
