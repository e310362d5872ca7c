"""What every rollout engine returns, embedded or remote."""

from dataclasses import dataclass, field

import torch


@dataclass
class ImageOutput:
    """One finished request: the image (uint8, C x H x W; a video F x C x H x W) and what training needs of it."""

    image: torch.Tensor
    trajectory: dict[str, torch.Tensor] = field(default_factory=dict)
    conditions: dict[str, torch.Tensor] = field(default_factory=dict)

    def cpu(self) -> "ImageOutput":
        """Ready to leave the process. A row of a batch is copied: pickling a view would send the whole batch."""
        return ImageOutput(
            self.image.cpu().clone(),
            {k: v.cpu().clone() for k, v in self.trajectory.items()},
            {k: v.cpu().clone() for k, v in self.conditions.items()},
        )


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
