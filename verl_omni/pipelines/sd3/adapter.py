"""Stable Diffusion 3 and 3.5: latents (B, C, h, w), two CLIPs and T5 side by side without a mask, pooled embeddings."""

from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.plain_latents import PlainLatents
from verl_omni.pipelines.utils import clip_ids, flow_shift, read_component_config, t5_ids

CLIP_LENGTH = 77


@DiffusionModelBase.register("StableDiffusion3Pipeline", algorithm="flow_grpo")
class StableDiffusion3(PlainLatents, DiffusionModelBase):
    default_guidance = 7.0
    lora_target_modules = [
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    ]  # fmt: skip
    fp8_modules = [
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    ]  # fmt: skip
    pipeline_defaults = {"negative_prompt": "", "max_sequence_length": 256}
    vllm_omni_needs = ("text_encoder_3",)  # T5

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return {"guidance_scale"}

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        shift = {}
        if scheduler.config.use_dynamic_shifting:
            rows, columns = cls.grid(model_config)
            shift["mu"] = flow_shift(rows * columns, scheduler.config)
        scheduler.set_timesteps(model_config.pipeline.num_inference_steps, device=device, **shift)

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
            "timestep": timestep,
            "encoder_hidden_states": prompt["prompt_embeds"],
            "pooled_projections": prompt["pooled_prompt_embeds"],
        }

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        """CLIP-L, CLIP-G and T5 one after another: 77, 77 and `max_sequence_length` ids (0 in a folder without T5)."""
        ids = clip_ids(tokenizers["tokenizer"], prompt) + clip_ids(tokenizers["tokenizer_2"], prompt)
        if "tokenizer_3" not in tokenizers:
            return ids + [0] * max_sequence_length
        return ids + t5_ids(tokenizers["tokenizer_3"], prompt, max_sequence_length)

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        ids = torch.tensor([prompt_ids], device=pipe.text_encoder.device)
        clip_l, clip_g, t5 = ids.tensor_split((CLIP_LENGTH, 2 * CLIP_LENGTH), dim=1)
        outputs = [
            pipe.text_encoder(clip_l, output_hidden_states=True),
            pipe.text_encoder_2(clip_g, output_hidden_states=True),
        ]
        clip = torch.cat([out.hidden_states[-2] for out in outputs], dim=-1)
        if pipe.text_encoder_3 is not None:
            long = pipe.text_encoder_3(t5)[0]
        else:  # upstream stands zeros in for a T5 that was left out
            width = read_component_config(model_config.path, model_config.transformer_subfolder)["joint_attention_dim"]
            long = clip.new_zeros(1, t5.shape[1], width)
        clip = torch.nn.functional.pad(clip, (0, long.shape[-1] - clip.shape[-1]))
        return {
            "prompt_embeds": torch.cat([clip, long], dim=1),
            "pooled_prompt_embeds": torch.cat([out.text_embeds for out in outputs], dim=-1),
        }

    @classmethod
    def conditions_like(cls, model_config: DiffusionModelConfig, tokens: int) -> Conditions:
        conditions = super().conditions_like(model_config, tokens - CLIP_LENGTH)  # the two CLIPs lie over each other
        pooled = torch.zeros(1, cls.transformer_config(model_config)["pooled_projection_dim"])
        return conditions | {"pooled_prompt_embeds": pooled}
