"""What every rollout engine returns, embedded or remote."""

from dataclasses import dataclass, field

import torch


@dataclass
class ImageOutput:
    """One finished request: the image (uint8, C x H x W; a video F x C x H x W) and what training needs of its making."""

    image: torch.Tensor
    trajectory: dict[str, torch.Tensor] = field(default_factory=dict)
    conditions: dict[str, torch.Tensor] = field(default_factory=dict)
