"""FLUX.1 Kontext: FLUX.1 that edits one image, whose latents follow a row's own in the sequence.

The transformer takes one set of positions for a whole batch, so that rows whose images have another size go through it
in a call of their own.
"""

from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.flux.adapter import Flux
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.utils import forward_in_groups


def resized(pipe: Any, images: list[Any] | None) -> torch.Tensor:
    """The image as upstream shows it to its VAE: in that of its preferred sizes whose shape is nearest."""
    from diffusers.pipelines.flux import pipeline_flux_kontext as upstream

    if images is None or len(images) != 1:
        raise ValueError(
            f"FLUX.1 Kontext edits one image: every prompt needs one in the data's column `images`, and this one has "
            f"{len(images or ())}"
        )
    height, width = pipe.image_processor.get_default_height_width(images[0])
    shape = width / height
    _, width, height = min((abs(shape - w / h), w, h) for w, h in upstream.PREFERRED_KONTEXT_RESOLUTIONS)
    step = 2 * pipe.vae_scale_factor
    height, width = height // step * step, width // step * step
    return pipe.image_processor.preprocess(pipe.image_processor.resize(images[0], height, width), height, width)


@DiffusionModelBase.register("FluxKontextPipeline", algorithm="flow_grpo")
class FluxKontext(Flux):
    needs_images = True
    shares_tokens = False

    @classmethod
    def images_of_a_prompt(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        return 1, 1

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        inputs = super().model_inputs(module, model_config, sample, timestep, prompt)
        return inputs | {
            "hidden_states": torch.cat([sample, prompt["reference_latents"].to(sample.dtype)], dim=1),
            "reference_sizes": [tuple(size) for size in prompt["reference_size"].tolist()],
        }

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        """One call for all rows whose images have the same size."""
        inputs = dict(model_inputs)
        sizes, own = inputs.pop("reference_sizes"), inputs["img_ids"]
        shared = {name: inputs.pop(name) for name in cls.rowless_inputs}
        one, call = torch.ones_like(own[:1, 0]), super().forward

        def rows_of_one_size(rows: list[int]) -> torch.Tensor:
            lines = (torch.arange(n, device=own.device) for n in sizes[rows[0]])
            positions = torch.cat([own, torch.cartesian_prod(one, *lines)])
            chosen = {name: value[rows] for name, value in inputs.items()}
            chosen["hidden_states"] = chosen["hidden_states"][:, : len(positions)]
            return call(module, chosen | shared | {"img_ids": positions})[:, : len(own)]

        return forward_in_groups(module, sizes, rows_of_one_size)

    @classmethod
    def encode_images(cls, pipe, images: list[Any] | None, model_config: DiffusionModelConfig) -> Conditions:
        pixels = resized(pipe, images).to(pipe.vae.device, pipe.vae.dtype)
        latents = pipe._encode_vae_image(pixels, None)
        size = [n // 2 for n in latents.shape[2:]]
        return {
            "reference_latents": pipe._pack_latents(latents, *latents.shape),
            "reference_size": torch.tensor([size], device=latents.device),
        }

    @classmethod
    def images_like(cls, model_config: DiffusionModelConfig) -> Conditions:
        """A square image."""
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS as SIZES

        size = [n // (2 * cls.vae_scale_factor(model_config)) for n in min(SIZES, key=lambda one: abs(one[0] - one[1]))]
        return {
            "reference_latents": torch.zeros(1, size[0] * size[1], cls.transformer_config(model_config)["in_channels"]),
            "reference_size": torch.tensor([size]),
        }

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        size, channels, device = model_config.pipeline, module.config.in_channels // 4, generators[0].device
        return pipe.prepare_latents(
            None, len(generators), channels, size.height, size.width, torch.float32, device, generators
        )[0]
