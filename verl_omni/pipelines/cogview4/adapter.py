"""CogView4, text to image: latents (B, C, h, w), a time that is not σ, and the last but one layer of GLM.

Text is padded on the left to a multiple of 16 tokens and has no mask: only prompts of one length share a forward.
"""

from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.unshifted_time import UnshiftedTime
from verl_omni.pipelines.utils import check_length, encode_pixels, forward_by_length

MULTIPLE = 16


@DiffusionModelBase.register("CogView4Pipeline", algorithm="flow_grpo")
class CogView4(UnshiftedTime):
    default_guidance = 5.0
    fp8_modules = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
    shares_tokens = False
    pipeline_defaults = {"negative_prompt": "", "max_sequence_length": 1024}

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return {"guidance_scale"}

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        size = model_config.pipeline
        whole = sample.new_tensor([[size.height, size.width]]).expand(len(sample), 2)
        return {
            "hidden_states": sample,
            "encoder_hidden_states": prompt["prompt_embeds"],
            "mask": prompt["prompt_embeds_mask"],
            "timestep": timestep,
            "original_size": whole,
            "target_size": whole,
            "crop_coords": torch.zeros_like(whole),
        }

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        return forward_by_length(module, model_inputs, "mask", super().forward)

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        tokenizer = tokenizers["tokenizer"]
        ids = tokenizer(prompt).input_ids
        check_length(prompt, len(ids), max_sequence_length)
        return [tokenizer.pad_token_id] * (-len(ids) % MULTIPLE) + ids

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        ids = torch.tensor([prompt_ids], device=pipe.text_encoder.device, dtype=torch.long)
        embeds = pipe.text_encoder(ids, output_hidden_states=True).hidden_states[-2]
        return {"prompt_embeds": embeds, "prompt_embeds_mask": torch.ones_like(ids, dtype=torch.bool)}

    @classmethod
    def conditions_like(cls, model_config: DiffusionModelConfig, tokens: int) -> Conditions:
        width = cls.transformer_config(model_config)["text_embed_dim"]
        return {"prompt_embeds": torch.zeros(1, tokens, width), "prompt_embeds_mask": torch.ones(1, tokens).bool()}

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        size, device = model_config.pipeline, generators[0].device
        return pipe.prepare_latents(
            len(generators), module.config.in_channels, size.height, size.width, torch.float32, device, generators
        )

    @classmethod
    def decode_latents(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        image = pipe.vae.decode(latents.to(pipe.vae.dtype) / pipe.vae.config.scaling_factor, return_dict=False)[0]
        return pipe.image_processor.postprocess(image, output_type="pt")

    @classmethod
    def encode_image(cls, pipe, images: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        return encode_pixels(pipe, images) * pipe.vae.config.scaling_factor
