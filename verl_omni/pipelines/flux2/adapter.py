"""FLUX.2, text to image: packed latents (B, tokens, 4C) that the VAE's batch norm scales, and three hidden layers of a
language model side by side, with the padding up to `max_sequence_length` in and without a mask.
"""

import os
from typing import Any

import numpy as np
import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.utils import check_length, encode_pixels, read_index
from verl_omni.utils.model_code import refuse_code

PADDING = -1  # stands for padding in token ids, so that a pad token inside a prompt is not mistaken for it


@DiffusionModelBase.register("Flux2Pipeline", algorithm="flow_grpo")
class Flux2(DiffusionModelBase):
    lora_target_modules = [
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
        "ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out", "to_qkv_mlp_proj",
    ]  # fmt: skip
    fp8_modules = [*lora_target_modules, "attn.to_out"]
    rowless_inputs = ("img_ids", "txt_ids")
    hidden_layers = (10, 20, 30)

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return {"guidance_scale"}

    @classmethod
    def cfg_scale(cls, model_config: DiffusionModelConfig) -> float:
        return 1.0

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        steps = model_config.pipeline.num_inference_steps
        rows, columns = cls.grid(model_config)
        mu = compute_empirical_mu(rows * columns, steps)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu, device=device)

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        one, embeds = torch.zeros(1, dtype=torch.long, device=sample.device), prompt["prompt_embeds"]
        sizes = (*cls.grid(model_config), embeds.shape[1])
        rows, columns, words = (torch.arange(n, device=sample.device) for n in sizes)
        inputs = {
            "hidden_states": sample,
            "timestep": timestep / 1000,
            "img_ids": torch.cartesian_prod(one, rows, columns, one),
            "txt_ids": torch.cartesian_prod(one, one, one, words),
            "encoder_hidden_states": embeds,
        }
        if module.config.guidance_embeds:
            scale = model_config.pipeline.guidance_scale
            inputs["guidance"] = sample.new_full((len(sample),), 4.0 if scale is None else scale)
        return inputs

    @classmethod
    def load_processors(cls, model_config: DiffusionModelConfig) -> dict[str, Any]:
        """The tokenizer alone: the processor around it is for images, and wants torchvision."""
        from transformers import AutoTokenizer

        folder = os.path.join(os.path.expanduser(model_config.tokenizer_path or model_config.path), "tokenizer")
        refuse_code(folder)
        return {"tokenizer": AutoTokenizer.from_pretrained(folder)}

    @classmethod
    def load_tokenizers(cls, model_config: DiffusionModelConfig) -> dict[str, Any]:
        return cls.load_processors(model_config)

    @classmethod
    def chat(cls, tokenizer, prompt: str) -> list[int]:
        """Token ids of the prompt in upstream's conversation."""
        from diffusers.pipelines.flux2.pipeline_flux2 import SYSTEM_MESSAGE, format_input

        (messages,) = format_input([prompt], SYSTEM_MESSAGE)
        return tokenizer.apply_chat_template(messages, add_generation_prompt=False, return_dict=True)["input_ids"]

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        tokenizer = tokenizers["tokenizer"]
        ids = cls.chat(tokenizer, prompt)
        check_length(prompt, len(ids), max_sequence_length)
        padding = [PADDING] * (max_sequence_length - len(ids))
        return ids + padding if tokenizer.padding_side == "right" else padding + ids

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        ids = torch.tensor([prompt_ids], device=pipe.text_encoder.device)
        mask = ids != PADDING
        hidden = pipe.text_encoder(
            input_ids=ids.where(mask, pipe.tokenizer.pad_token_id),
            attention_mask=mask.long(),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        return {"prompt_embeds": torch.cat([hidden[layer] for layer in cls.hidden_layers], dim=-1)}

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        size, channels, device = model_config.pipeline, module.config.in_channels // 4, generators[0].device
        latents, _ = pipe.prepare_latents(
            len(generators), channels, size.height, size.width, torch.float32, device, generators
        )
        return latents

    @classmethod
    def latents_by_place(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        return pipe._unpatchify_latents(latents.mT.unflatten(2, cls.grid(model_config)))

    @classmethod
    def decode_latents(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        mean, std = cls._latent_statistics(pipe.vae)
        latents = cls.latents_by_place(pipe, latents * std.to(latents) + mean.to(latents), model_config)
        image = pipe.vae.decode(latents.to(pipe.vae.dtype), return_dict=False)[0]
        return pipe.image_processor.postprocess(image, output_type="pt")

    @classmethod
    def encode_image(cls, pipe, images: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        mean, std = cls._latent_statistics(pipe.vae)
        latents = pipe._pack_latents(pipe._patchify_latents(encode_pixels(pipe, images)))
        return (latents - mean.to(latents)) / std.to(latents)

    @staticmethod
    def _latent_statistics(vae) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of each channel of a token."""
        return vae.bn.running_mean, (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()


@DiffusionModelBase.register("Flux2KleinPipeline", algorithm="flow_grpo")
class Flux2Klein(Flux2):
    hidden_layers = (9, 18, 27)

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return set() if read_index(model_config.path).get("is_distilled") else {"guidance_scale"}

    @classmethod
    def cfg_scale(cls, model_config: DiffusionModelConfig) -> float:
        if read_index(model_config.path).get("is_distilled"):
            return 1.0
        scale = model_config.pipeline.guidance_scale
        return 4.0 if scale is None else scale

    @classmethod
    def chat(cls, tokenizer, prompt: str) -> list[int]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return tokenizer(text).input_ids
