"""Which samples meet in an optimizer step, and which of their denoising steps are trained."""

import math

import torch


def minibatch_order(
    prompts: int, samples_per_prompt: int, mini_batches: int, ranks: int, seed: int | None = None
) -> torch.Tensor:
    """Row order in which contiguous chunks for `ranks` ranks, cut into `mini_batches`, give the same mini-batches.

    Mini-batch k holds the same prompts for any number of ranks, so that the update does not depend on it. With a seed
    the prompts are shuffled first.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    groups = torch.arange(prompts) if generator is None else torch.randperm(prompts, generator=generator)
    rows = (groups[:, None] * samples_per_prompt + torch.arange(samples_per_prompt)).reshape(-1)
    return rows.reshape(mini_batches, ranks, -1).transpose(0, 1).reshape(-1)


def train_steps(shape: tuple[int, int], fraction: float, seed: int) -> torch.Tensor:
    """A random share of each sample's steps, (B, K), in order."""
    samples, steps = shape
    count = max(1, math.ceil(steps * fraction - 1e-9))
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(samples, steps, generator=generator).argsort(dim=1)[:, :count].sort(dim=1).values


def deal_units(
    units: int, mini_batches: int, ranks: int, seed: int | None = None, group: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Spread any number of units over mini-batches and ranks so that the update depends on neither ranks nor remainder.

    A mini-batch holds the same units for any number of ranks. Where they do not divide among the ranks, the first unit
    fills the gap with share 0: every rank takes part in every forward, and no copy counts. Units of one `group` (the
    number of each one's) meet in a mini-batch, on any rank.

    Returns the units in rank order, each one's share of its rank's mean, and the units a rank has of each mini-batch.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    kept = units if group is None else int(group.max()) + 1
    order = torch.arange(kept) if generator is None else torch.randperm(kept, generator=generator)
    dealt, shares, sizes = [], [], []
    for mini in order.tensor_split(min(mini_batches, kept)):
        if group is not None:
            mini = torch.cat([(group == number).nonzero()[:, 0] for number in mini.tolist()])
        per_rank = math.ceil(len(mini) / ranks)
        gap = per_rank * ranks - len(mini)
        dealt.append(torch.cat([mini, mini[:1].expand(gap)]).reshape(ranks, per_rank))
        share = torch.full((len(mini),), ranks / len(mini), dtype=torch.float64)
        shares.append(torch.cat([share, share.new_zeros(gap)]).reshape(ranks, per_rank))
        sizes.append(per_rank)
    return torch.cat(dealt, dim=1).reshape(-1), torch.cat(shares, dim=1).reshape(-1), sizes
