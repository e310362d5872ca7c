"""What image processors do by PIL, in torch: with a gradient to the pixels.

PIL rounds to 256 steps of brightness and clips, after rows and after columns; torch clips at the end. Values differ by
1/255 or so.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl_omni.utils.errors import RunError

if TYPE_CHECKING:
    import torch

# By PIL's numbers; with antialias=True torch's weights are PIL's own.
RESAMPLING = {2: "bilinear", 3: "bicubic"}


def prepared(pixels: "torch.Tensor", processor: Any) -> "torch.Tensor":
    """What the image processor of CLIP or SigLIP makes of pixels (B, 3, H, W) in [0, 1]."""
    height, width = pixels.shape[-2:]
    if processor.size.get("shortest_edge") is not None:
        edge = processor.size["shortest_edge"]
        size = [max(edge, int(side * edge / min(height, width))) for side in (height, width)]
    else:
        size = [processor.size["height"], processor.size["width"]]
    image = resized(pixels, size, processor.resample)
    if processor.do_center_crop:
        crop = [processor.crop_size["height"], processor.crop_size["width"]]
        image = cut(image, (size[0] - crop[0]) // 2, (size[1] - crop[1]) // 2, crop)
    return normalised(image, processor.image_mean, processor.image_std)


def resized(pixels: "torch.Tensor", size: Sequence[int], resample: int) -> "torch.Tensor":
    """To height and width; what bicubic interpolation has beyond [0, 1] at an edge is cut off, as in PIL."""
    from torch.nn import functional

    if resample not in RESAMPLING:
        raise RunError(
            f"actor_rollout_ref.model.algorithm=draft: images are resized for this reward by PIL's resampling "
            f"{int(resample)}, which has no gradient here: it has by 2 (bilinear) and 3 (bicubic)"
        )
    return functional.interpolate(pixels.float(), tuple(size), mode=RESAMPLING[resample], antialias=True).clamp(0, 1)


def cut(pixels: "torch.Tensor", top: int, left: int, size: Sequence[int]) -> "torch.Tensor":
    """A part of height and width `size`."""
    return pixels[..., top : top + size[0], left : left + size[1]]


def normalised(pixels: "torch.Tensor", mean: Sequence[float], std: Sequence[float]) -> "torch.Tensor":
    """Each colour less its mean, over its deviation."""
    import torch

    mean, std = (torch.tensor(values).to(pixels).view(3, 1, 1) for values in (mean, std))
    return (pixels - mean) / std


def in_clips_units(pixels: "torch.Tensor") -> "torch.Tensor":
    """As CLIP's own pixels are, whose mean and deviation others have taken over."""
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    return normalised(pixels, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
