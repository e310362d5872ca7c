"""Qwen-Image: packed latents (B, tokens, 4C), a chat template around the prompt, true CFG with norm rescaling."""

from typing import Any

import numpy as np
import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.utils import (
    check_length,
    dense_mask,
    encode_pixels,
    flow_shift,
    takes_guidance,
    trim_padding,
)

# The template around every prompt; its first 34 tokens are dropped after encoding. Both are facts of the checkpoint.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TEMPLATE_START = 34


@DiffusionModelBase.register("QwenImagePipeline", algorithm="flow_grpo")
class QwenImage(DiffusionModelBase):
    lora_target_modules = [
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
        "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    ]  # fmt: skip
    # Of these, others have found img_mlp to change images most, and it is more than half of the work.
    fp8_modules = lora_target_modules
    pipeline_defaults = {"negative_prompt": " ", "max_sequence_length": 512}

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return {"true_cfg_scale", "guidance_scale"} if takes_guidance(model_config) else {"true_cfg_scale"}

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        steps = model_config.pipeline.num_inference_steps
        rows, columns = cls.grid(model_config)
        mu = flow_shift(rows * columns, scheduler.config)
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
        embeds, mask = trim_padding(prompt["prompt_embeds"], prompt["prompt_embeds_mask"])
        inputs = {
            "hidden_states": sample,
            "timestep": timestep / 1000,
            "img_shapes": [[(1, *cls.grid(model_config))]] * len(sample),
            "encoder_hidden_states": embeds,
            "encoder_hidden_states_mask": dense_mask(mask),
        }
        if module.config.guidance_embeds:
            inputs["guidance"] = torch.full((len(sample),), model_config.pipeline.guidance_scale, device=sample.device)
        return inputs

    @classmethod
    def combine_cfg(cls, cond: torch.Tensor, uncond: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        guided = super().combine_cfg(cond, uncond, scale)
        return guided * (cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        ids = tokenizers["tokenizer"](TEMPLATE.format(prompt)).input_ids
        check_length(prompt, len(ids) - TEMPLATE_START, max_sequence_length)
        return ids

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        ids = torch.tensor([prompt_ids], device=pipe.text_encoder.device)
        hidden = pipe.text_encoder(
            input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True
        ).hidden_states[-1]
        embeds = hidden[:, TEMPLATE_START:]
        return {
            "prompt_embeds": embeds,
            "prompt_embeds_mask": torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device),
        }

    @classmethod
    def conditions_like(cls, model_config: DiffusionModelConfig, tokens: int) -> Conditions:
        return super().conditions_like(model_config, tokens - TEMPLATE_START)

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        size, channels = model_config.pipeline, module.config.in_channels // 4
        device = generators[0].device
        return pipe.prepare_latents(
            len(generators), channels, size.height, size.width, torch.float32, device, generators
        )

    @classmethod
    def latents_by_place(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        size = model_config.pipeline
        return pipe._unpack_latents(latents, size.height, size.width, pipe.vae_scale_factor)[:, :, 0]

    @classmethod
    def decode_latents(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        vae = pipe.vae
        latents = cls.latents_by_place(pipe, latents, model_config)[:, :, None].to(vae.dtype)
        mean, std = cls._latent_statistics(vae, latents)
        image = vae.decode(latents * std + mean, return_dict=False)[0][:, :, 0]
        return pipe.image_processor.postprocess(image, output_type="pt")

    @classmethod
    def encode_image(cls, pipe, images: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        latents = encode_pixels(pipe, images[:, :, None])
        mean, std = cls._latent_statistics(pipe.vae, latents)
        batch, channels, _, height, width = latents.shape
        return pipe._pack_latents((latents - mean) / std, batch, channels, height, width)

    @staticmethod
    def _latent_statistics(vae, latents: torch.Tensor) -> list[torch.Tensor]:
        """Mean and standard deviation of each latent channel, shaped and typed for `latents` (B, C, 1, h, w)."""
        values = (vae.config.latents_mean, vae.config.latents_std)
        return [torch.tensor(v).to(latents).view(1, vae.config.z_dim, 1, 1, 1) for v in values]

    @classmethod
    def check(cls, model_config: DiffusionModelConfig) -> None:
        if takes_guidance(model_config) and model_config.pipeline.guidance_scale is None:
            raise ValueError(
                "this Qwen-Image is guidance-distilled: set actor_rollout_ref.rollout.pipeline.guidance_scale"
            )
