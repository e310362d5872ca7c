"""FLUX.1: packed latents (B, tokens, 4C), guidance as an input of the transformer, T5 without a mask, pooled CLIP.

`guidance_scale` is that input. `true_cfg_scale` above 1 is classifier-free guidance, as upstream.
"""

from typing import Any

import numpy as np
import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.utils import clip_ids, decode_image, encode_image, flow_shift, t5_ids, takes_guidance

CLIP_LENGTH = 77


@DiffusionModelBase.register("FluxPipeline", algorithm="flow_grpo")
class Flux(DiffusionModelBase):
    lora_target_modules = [
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    ]  # fmt: skip
    fp8_modules = [*lora_target_modules, "proj_mlp", "proj_out"]
    rowless_inputs = ("img_ids", "txt_ids")
    # torch's own choice on an H200, cuDNN, ends the first backward of FLUX.1-dev with an illegal memory access (2.11).
    attention_backend = "_native_flash"

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
        rows, columns = (torch.arange(n, device=sample.device) for n in cls.grid(model_config))
        inputs = {
            "hidden_states": sample,
            "timestep": timestep / 1000,
            "img_ids": torch.cartesian_prod(torch.zeros_like(rows[:1]), rows, columns),
            "encoder_hidden_states": prompt["prompt_embeds"],
            "txt_ids": rows.new_zeros(prompt["prompt_embeds"].shape[1], 3),
            "pooled_projections": prompt["pooled_prompt_embeds"],
        }
        if module.config.guidance_embeds:
            scale = model_config.pipeline.guidance_scale
            inputs["guidance"] = sample.new_full((len(sample),), 3.5 if scale is None else scale)
        return inputs

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        """CLIP and T5 one after another: 77 and `max_sequence_length` ids."""
        clip, t5 = tokenizers["tokenizer"], tokenizers["tokenizer_2"]
        return clip_ids(clip, prompt) + t5_ids(t5, prompt, max_sequence_length)

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        clip, t5 = torch.tensor([prompt_ids], device=pipe.text_encoder.device).tensor_split((CLIP_LENGTH,), dim=1)
        return {
            "prompt_embeds": pipe.text_encoder_2(t5)[0],
            "pooled_prompt_embeds": pipe.text_encoder(clip).pooler_output,
        }

    @classmethod
    def conditions_like(cls, model_config: DiffusionModelConfig, tokens: int) -> Conditions:
        conditions = super().conditions_like(model_config, tokens - CLIP_LENGTH)
        pooled = torch.zeros(1, cls.transformer_config(model_config)["pooled_projection_dim"])
        return conditions | {"pooled_prompt_embeds": pooled}

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
        size = model_config.pipeline
        return pipe._unpack_latents(latents, size.height, size.width, pipe.vae_scale_factor)

    @classmethod
    def decode_latents(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        return decode_image(pipe, cls.latents_by_place(pipe, latents, model_config))

    @classmethod
    def encode_image(cls, pipe, images: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        latents = encode_image(pipe, images)
        return pipe._pack_latents(latents, *latents.shape)
