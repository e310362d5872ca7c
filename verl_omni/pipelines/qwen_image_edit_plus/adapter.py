"""Qwen-Image-Edit: Qwen-Image that also sees reference images, as tokens of the prompt and as latents in the sequence.

A row's reference latents follow its own. The transformer takes one set of image shapes for a whole batch, so that rows
whose references have other shapes go through it in a call of their own.
"""

import math
import os
from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.qwen_image.adapter import QwenImage
from verl_omni.pipelines.utils import check_length, dense_mask, forward_in_groups, trim_padding
from verl_omni.pipelines.vision_processor import image_text_processor
from verl_omni.utils.model_code import refuse_code

# The template around every prompt; its first 64 tokens are dropped after encoding. Both are facts of the checkpoint.
TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_START = 64
PICTURE = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"


def resized(images: list[Any] | None, area: str) -> list[tuple[Any, int, int]]:
    """(image, height, width) at one of upstream's two sizes, CONDITION_IMAGE_SIZE or VAE_IMAGE_SIZE."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as upstream

    if not images:
        raise ValueError("Qwen-Image-Edit edits images: every prompt needs at least one, in the data's column `images`")
    sizes = [upstream.calculate_dimensions(getattr(upstream, area), image.width / image.height) for image in images]
    return [(image, height, width) for image, (width, height) in zip(images, sizes, strict=True)]


def condition_images(images: list[Any] | None) -> list[Any]:
    """The images as the text encoder sees them."""
    from diffusers.image_processor import VaeImageProcessor

    resize = VaeImageProcessor().resize
    return [resize(image, height, width) for image, height, width in resized(images, "CONDITION_IMAGE_SIZE")]


@DiffusionModelBase.register("QwenImageEditPlusPipeline", algorithm="flow_grpo")
class QwenImageEditPlus(QwenImage):
    needs_images = True
    tokenizes_images = True

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
        references, sizes = prompt["reference_latents"], prompt["reference_sizes"].tolist()
        return inputs | {
            "hidden_states": torch.cat([sample, references.to(sample.dtype)], dim=1),
            "img_shapes": [
                [*own, *((1, height, width) for height, width in row if height)]
                for own, row in zip(inputs["img_shapes"], sizes, strict=True)
            ],
        }

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        """One call for all rows of the same image shapes."""
        kinds = [tuple(shapes) for shapes in model_inputs["img_shapes"]]
        return forward_in_groups(module, kinds, lambda rows: cls._forward_rows(module, model_inputs, rows))

    @classmethod
    def _forward_rows(cls, module: torch.nn.Module, model_inputs: dict[str, Any], rows: list[int]) -> torch.Tensor:
        tensors = {k: v[rows] for k, v in model_inputs.items() if isinstance(v, torch.Tensor)}
        shapes = model_inputs["img_shapes"][rows[0]]
        tensors["hidden_states"] = tensors["hidden_states"][:, : sum(math.prod(shape) for shape in shapes)]
        mask = tensors.pop("encoder_hidden_states_mask", None)
        if mask is not None:
            tensors["encoder_hidden_states"], mask = trim_padding(tensors["encoder_hidden_states"], mask)
        inputs = tensors | {"img_shapes": [shapes] * len(rows), "encoder_hidden_states_mask": dense_mask(mask)}
        return super().forward(module, inputs)[:, : math.prod(shapes[0])]

    @classmethod
    def load_processors(cls, model_config: DiffusionModelConfig) -> dict[str, Any]:
        folder = os.path.join(os.path.expanduser(model_config.tokenizer_path or model_config.path), "processor")
        refuse_code(folder)
        return {"processor": image_text_processor().from_pretrained(folder)}

    @classmethod
    def load_tokenizers(cls, model_config: DiffusionModelConfig) -> dict[str, Any]:
        return cls.load_processors(model_config)

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        """`max_sequence_length` counts the words, not the images."""
        processor = tokenizers["processor"]
        seen = condition_images(images)
        pictures = "".join(PICTURE.format(i + 1) for i in range(len(seen)))
        (ids,) = processor(text=[TEMPLATE.format(pictures + prompt)], images=seen).input_ids
        words = len(ids) - TEMPLATE_START - ids.count(processor.image_token_id)
        check_length(prompt, words, max_sequence_length)
        return list(ids)

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        device = pipe.text_encoder.device
        ids = torch.tensor([prompt_ids], device=device)
        seen = pipe.processor.image_processor(images=condition_images(images), return_tensors="pt").to(device)
        hidden = pipe.text_encoder(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=seen["pixel_values"],
            image_grid_thw=seen["image_grid_thw"],
            output_hidden_states=True,
        ).hidden_states[-1]
        embeds = hidden[:, TEMPLATE_START:]
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=device)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}

    @classmethod
    def encode_images(cls, pipe, images: list[Any] | None, model_config: DiffusionModelConfig) -> Conditions:
        device, packed, sizes = pipe.vae.device, [], []
        for image, height, width in resized(images, "VAE_IMAGE_SIZE"):
            pixels = pipe.image_processor.preprocess(image, height, width).unsqueeze(2).to(device, pipe.vae.dtype)
            latents = pipe._encode_vae_image(pixels, None)
            channels, rows, columns = latents.shape[1], *latents.shape[3:]
            packed.append(pipe._pack_latents(latents, 1, channels, rows, columns))
            sizes.append((rows // 2, columns // 2))
        return {
            "reference_latents": torch.cat(packed, dim=1),
            "reference_sizes": torch.tensor([sizes], device=device),
        }

    @classmethod
    def conditions_like(cls, model_config: DiffusionModelConfig, tokens: int) -> Conditions:
        return DiffusionModelBase.conditions_like.__func__(cls, model_config, tokens - TEMPLATE_START)

    @classmethod
    def images_like(cls, model_config: DiffusionModelConfig) -> Conditions:
        """One square reference image."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import VAE_IMAGE_SIZE

        side = math.isqrt(VAE_IMAGE_SIZE) // (2 * cls.vae_scale_factor(model_config))
        channels = cls.transformer_config(model_config)["in_channels"]
        return {
            "reference_latents": torch.zeros(1, side * side, channels),
            "reference_sizes": torch.tensor([[(side, side)]]),
        }

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        size, channels, device = model_config.pipeline, module.config.in_channels // 4, generators[0].device
        latents, _ = pipe.prepare_latents(
            None, len(generators), channels, size.height, size.width, torch.float32, device, generators
        )
        return latents
