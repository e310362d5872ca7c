"""Samples, and single steps of samples, that are left out of an update as if they had not been drawn."""

import torch
from verl.protocol import DataProto


def with_gaps(
    whole: DataProto, part: DataProto, rows_of_part: torch.Tensor, kept: torch.Tensor, mini_batches: int, ranks: int
) -> tuple[DataProto, int]:
    """(all rows in training order, where steps that are left out count nothing; mini-batches with anything in them).

    `kept` (B, K) says which of the trained steps are learned from. What is new in `part`, the rows of `whole` that
    `rows_of_part` (B,) marks, is 0 for others.
    """
    rows, share, mini_batches = rows_and_shares(kept, mini_batches, ranks)
    for name in set(part.batch.keys()) - set(whole.batch.keys()):  # advantages, weights, ...
        value = part.batch[name]
        whole.batch[name] = value.new_zeros(len(whole), *value.shape[1:])
        whole.batch[name][rows_of_part] = value
    whole.batch["share"] = torch.zeros(kept.shape, dtype=torch.float64)
    whole.batch["share"][rows] = share
    return whole[rows], mini_batches


def rows_and_shares(kept: torch.Tensor, mini_batches: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What to train on where some steps (B, K) are left out: (rows, the share of each of their steps in its rank's
    mean, mini-batches).

    Rows are in training order: contiguous chunks of ranks, each cut into mini-batches. A step that is left out stays
    with share 0, so that ranks have equally many; a mini-batch of which nothing is left goes.
    """
    steps = kept.shape[1]
    by_mini = kept.reshape(ranks, mini_batches, -1, steps)
    count = by_mini.sum(dim=(0, 2, 3), keepdim=True)
    share = by_mini * (ranks / count.clamp_min(1).double())
    alive = count.flatten() > 0
    rows = torch.arange(len(kept)).reshape(by_mini.shape[:3])[:, alive].reshape(-1)
    return rows, share[:, alive].reshape(-1, steps), int(alive.sum())
