"""Video VAEs on single images, without convolving frames that are not there."""

from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn


def speed_up_single_frames(vae: nn.Module) -> nn.Module:
    """Let the causal 3-D convolutions of a Qwen-Image or Wan VAE run as 2-D ones where the input is a single frame.

    A causal convolution pads a first frame with frames of zeros before it, so only the last slice of the kernel in
    time meets an image. Convolving with that slice alone gives the same result, for a fraction of the work. Input with
    more frames, or with cached ones, takes the ordinary way. Changes ``vae`` in place and returns it; weights,
    config and what ``save_pretrained`` writes stay as they are.
    """
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

    for module in vae.modules():
        if not isinstance(module, QwenImageCausalConv3d | WanCausalConv3d):
            continue
        frames_of_zeros = module._padding[4]
        if frames_of_zeros == module.kernel_size[0] - 1:
            module.forward = MethodType(_forward, module)
    return vae


def _forward(self: nn.Conv3d, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
    if x.shape[2] != 1 or cache_x is not None:
        return type(self).forward(self, x, cache_x)
    left, right, top, bottom, *_ = self._padding
    frame = F.pad(x[:, :, 0], (left, right, top, bottom))
    _, *stride = self.stride
    return F.conv2d(frame, self.weight[:, :, -1], self.bias, stride)[:, :, None]
