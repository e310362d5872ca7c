"""Z-Image: lists of samples instead of batches, time that runs from 0 (noise) to 1, and the negated velocity.

Upstream counts guidance from 0: `guidance_scale` g means cond + g (cond - uncond), which is a CFG scale of 1 + g.
"""

from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.plain_latents import PlainLatents
from verl_omni.pipelines.utils import check_length, diffusers_since, flow_shift

# Before 0.39 diffusers reached σ = 0 one step early. Its last step, from 0 to 0, changed nothing and is left out here:
# num_inference_steps=9 drew there what 8 draw now.
LAST_STEP_IS_IDLE = not diffusers_since("0.39")


@DiffusionModelBase.register("ZImagePipeline", algorithm="flow_grpo")
class ZImage(PlainLatents, DiffusionModelBase):
    default_guidance = 5.0
    lora_target_modules = [
        "attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0",
        "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
    ]  # fmt: skip
    fp8_modules = lora_target_modules

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return {"guidance_scale"}

    @classmethod
    def cfg_scale(cls, model_config: DiffusionModelConfig) -> float:
        return 1.0 + super().cfg_scale(model_config)

    @classmethod
    def num_steps(cls, model_config: DiffusionModelConfig) -> int:
        return model_config.pipeline.num_inference_steps - int(LAST_STEP_IS_IDLE)

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        rows, columns = cls.grid(model_config)
        steps = model_config.pipeline.num_inference_steps
        mu = flow_shift(rows * columns, scheduler.config)
        if LAST_STEP_IS_IDLE:
            scheduler.sigma_min = 0.0
            scheduler.set_timesteps(steps, mu=mu, device=device)
            scheduler.timesteps, scheduler.sigmas = scheduler.timesteps[:-1], scheduler.sigmas[:-1]
        else:
            scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist(), mu=mu, device=device)

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        embeds, mask = prompt["prompt_embeds"], prompt["prompt_embeds_mask"].bool()
        return {
            "x": list(sample.unsqueeze(2)),
            "t": (1000 - timestep) / 1000,
            "cap_feats": [row[real] for row, real in zip(embeds, mask, strict=True)],
        }

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        return -torch.stack(module(**model_inputs, return_dict=False)[0]).squeeze(2)

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        tokenizer = tokenizers["tokenizer"]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        ids = tokenizer(text).input_ids
        check_length(prompt, len(ids), max_sequence_length)
        return ids

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        ids = torch.tensor([prompt_ids], device=pipe.text_encoder.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        hidden = pipe.text_encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        return {"prompt_embeds": hidden[-2], "prompt_embeds_mask": mask}
