"""Where builders of tiny pipelines are registered, and what several of them build on."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, DiffusionPipeline

BUILDERS: dict[str, Callable[[], "DiffusionPipeline"]] = {}


def register_builder(pipeline_class: str) -> Callable:
    """Register a function without arguments that returns a randomly initialised tiny pipeline of this class."""

    def decorator(builder: Callable[[], "DiffusionPipeline"]) -> Callable[[], "DiffusionPipeline"]:
        BUILDERS[pipeline_class] = builder
        return builder

    return decorator


@torch.no_grad()
def strengthen(module: torch.nn.Module, gain: float) -> None:
    """Multiply the weights of linear and convolution layers: torch's default start lets a signal fade on its way."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d | torch.nn.Conv3d):
            layer.weight.mul_(gain)


def image_vae(**config) -> "AutoencoderKL":
    """The autoencoder of SD3, Flux and Z-Image with factor 8 and 4 latent channels."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        norm_num_groups=2,
        latent_channels=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **config,
    )
    strengthen(vae.decoder, 2.0)
    return vae
