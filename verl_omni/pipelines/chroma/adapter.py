"""Chroma: FLUX.1 without pooled text and without guidance as an input; T5 alone, with a mask.

Upstream's mask is one of numbers, which attention adds: 1 where both tokens count and 0 elsewhere. It is the model's
own, so that prompts keep their padding, as upstream.
"""

from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.flux.adapter import Flux
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.utils import t5_ids


@DiffusionModelBase.register("ChromaPipeline", algorithm="flow_grpo")
class Chroma(Flux):
    default_guidance = 5.0
    attention_backend = None  # the one that FLUX.1 prefers takes no mask
    shares_tokens = False

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
        embeds, mask = prompt["prompt_embeds"], prompt["prompt_embeds_mask"]
        rows, columns = (torch.arange(n, device=sample.device) for n in cls.grid(model_config))
        return {
            "hidden_states": sample,
            "timestep": timestep / 1000,
            "img_ids": torch.cartesian_prod(torch.zeros_like(rows[:1]), rows, columns),
            "encoder_hidden_states": embeds,
            "txt_ids": rows.new_zeros(embeds.shape[1], 3),
            "attention_mask": torch.nn.functional.pad(mask.to(embeds.dtype), (0, sample.shape[1]), value=1.0),
        }

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        return t5_ids(tokenizers["tokenizer"], prompt, max_sequence_length)

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        ids = torch.tensor([prompt_ids], device=pipe.text_encoder.device)
        real = ids != pipe.tokenizer.pad_token_id
        place = torch.arange(ids.shape[1], device=ids.device)
        return {
            "prompt_embeds": pipe.text_encoder(ids, attention_mask=real)[0],
            "prompt_embeds_mask": place[None] <= real.sum(dim=1),  # the first padding token counts
        }

    @classmethod
    def conditions_like(cls, model_config: DiffusionModelConfig, tokens: int) -> Conditions:
        return DiffusionModelBase.conditions_like.__func__(cls, model_config, tokens)

    @classmethod
    def check(cls, model_config: DiffusionModelConfig) -> None:
        super().check(model_config)
        if model_config.enable_gradient_checkpointing:
            raise ValueError(
                "actor_rollout_ref.model.enable_gradient_checkpointing=true: diffusers' Chroma leaves the mask of the "
                "prompt out of half its blocks then, and would train another model than it draws with: leave it out"
            )
