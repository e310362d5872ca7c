"""Lumina Image 2.0: time that runs from 0 (noise) to 1, the negated velocity, and a system prompt before the user's."""

from typing import Any

import numpy as np
import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.plain_latents import PlainLatents
from verl_omni.pipelines.utils import check_length, flow_shift

# Upstream's own default.
SYSTEM_PROMPT = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts."
)


@DiffusionModelBase.register("Lumina2Pipeline", algorithm="flow_grpo")
class Lumina2(PlainLatents, DiffusionModelBase):
    default_guidance = 4.0
    pipeline_defaults = {"negative_prompt": "", "max_sequence_length": 256}
    fp8_modules = [
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "feed_forward.linear_1", "feed_forward.linear_2", "feed_forward.linear_3",
    ]  # fmt: skip

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return {"guidance_scale"}

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        """Upstream shifts by the number of channels, which it takes for that of the tokens."""
        steps, channels = model_config.pipeline.num_inference_steps, cls.transformer_config(model_config)["in_channels"]
        mu = flow_shift(channels, scheduler.config)
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
        return {
            "hidden_states": sample,
            "timestep": 1 - timestep / 1000,
            "encoder_hidden_states": prompt["prompt_embeds"],
            "encoder_attention_mask": prompt["prompt_embeds_mask"],
        }

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        return -super().forward(module, model_inputs)

    @classmethod
    def combine_cfg(cls, cond: torch.Tensor, uncond: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        guided = super().combine_cfg(cond, uncond, scale)
        return guided * (cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        return cls.tokenize_negative(tokenizers, f"{SYSTEM_PROMPT} <Prompt Start> {prompt}", max_sequence_length)

    @classmethod
    def tokenize_negative(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        ids = tokenizers["tokenizer"](prompt).input_ids
        check_length(prompt, len(ids), max_sequence_length)
        return ids

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        ids = torch.tensor([prompt_ids], device=pipe.text_encoder.device)
        mask = torch.ones_like(ids)
        hidden = pipe.text_encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        return {"prompt_embeds": hidden[-2], "prompt_embeds_mask": mask}
