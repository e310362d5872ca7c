"""Batches of sequences of different length."""

import torch


def pad_and_cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the batch dimension; where dimension 1 differs, pad it at its end."""
    if len({t.shape[1:] for t in tensors}) == 1:
        return torch.cat(tensors)
    longest = max(t.shape[1] for t in tensors)
    padded = tensors[0].new_zeros(sum(len(t) for t in tensors), longest, *tensors[0].shape[2:])
    row = 0
    for t in tensors:
        padded[row : row + len(t), : t.shape[1]] = t
        row += len(t)
    return padded
