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
