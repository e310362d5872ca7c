"""Latents that are pictures themselves, (B, C, h, w), as diffusers' AutoencoderKL makes them."""

from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.utils import decode_image, encode_image


class PlainLatents:
    """For an adapter whose transformer takes them as they are: it names this class before the base class."""

    @classmethod
    def prepare_latents(
        cls, pipe: Any, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        size, device = model_config.pipeline, generators[0].device
        return pipe.prepare_latents(
            len(generators), module.config.in_channels, size.height, size.width, torch.float32, device, generators
        )

    @classmethod
    def decode_latents(cls, pipe: Any, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        return decode_image(pipe, latents)

    @classmethod
    def encode_image(cls, pipe: Any, images: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        return encode_image(pipe, images)
