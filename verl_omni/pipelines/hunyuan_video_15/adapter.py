"""HunyuanVideo-1.5, text to video: latents (B, C, F, h, w), Qwen2.5-VL for the prompt and ByT5 for words in quotes.

Upstream pads both, and has room for an image's features, which a prompt alone has not. The transformer masks what is
not there, so that it is left out here. Guidance is a component of the folder, the guider: its scale is the default of
`guidance_scale`.
"""

import inspect
import os
from typing import Any

import numpy as np
import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.utils import check_length, read_component_config
from verl_omni.utils.json_files import read_object

TEMPLATE_START = 108  # tokens of the system message, dropped after encoding
GLYPHS = 256  # ids of the words in quotes, padded
GUIDER = {"_class_name": "ClassifierFreeGuidance", "guidance_rescale": 0.0, "use_original_formulation": False}
GUIDER |= {"start": 0.0, "stop": 1.0, "enabled": True}


def guider_config(model_config: DiffusionModelConfig) -> dict[str, Any]:
    return read_object(os.path.join(os.path.expanduser(model_config.path), "guider", "guider_config.json"))


@DiffusionModelBase.register("HunyuanVideo15Pipeline", algorithm="flow_grpo")
class HunyuanVideo15(DiffusionModelBase):
    lora_target_modules = [
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    ]  # fmt: skip
    fp8_modules = lora_target_modules
    size_multiple = 1
    shares_tokens = False
    pipeline_defaults = {"negative_prompt": "", "max_sequence_length": 1000}

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return {"num_frames", "guidance_scale"}

    @classmethod
    def num_frames(cls, model_config: DiffusionModelConfig) -> int:
        return 121 if model_config.pipeline.num_frames is None else model_config.pipeline.num_frames

    @classmethod
    def frame_rate(cls, model_config: DiffusionModelConfig) -> float:
        return 24.0

    @classmethod
    def vae_scale_factor(cls, model_config: DiffusionModelConfig) -> int:
        return read_component_config(model_config.path, "vae")["spatial_compression_ratio"]

    @classmethod
    def tokens(cls, model_config: DiffusionModelConfig) -> int:
        step = read_component_config(model_config.path, "vae")["temporal_compression_ratio"]
        return ((cls.num_frames(model_config) - 1) // step + 1) * super().tokens(model_config)

    @classmethod
    def cfg_scale(cls, model_config: DiffusionModelConfig) -> float:
        scale = model_config.pipeline.guidance_scale
        return guider_config(model_config)["guidance_scale"] if scale is None else scale

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        steps = model_config.pipeline.num_inference_steps
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1], device=device)

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        no_image = torch.zeros_like(sample), torch.zeros_like(sample[:, :1])
        return {
            "hidden_states": torch.cat([sample, *no_image], dim=1),
            "timestep": timestep,
            "encoder_hidden_states": prompt["prompt_embeds"],
            "encoder_attention_mask": prompt["prompt_embeds_mask"],
            "encoder_hidden_states_2": prompt["glyph_embeds"],
            "encoder_attention_mask_2": prompt["glyph_embeds_mask"],
            "image_embeds": sample.new_zeros(len(sample), 1, module.config.image_embed_dim),
        }

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        """ByT5's ids of the words in quotes, `GLYPHS` of them, and those of the prompt in its template."""
        from diffusers import HunyuanVideo15Pipeline as Upstream
        from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as upstream

        message = inspect.signature(Upstream._get_mllm_prompt_embeds).parameters["system_message"].default
        (talk,) = upstream.format_text_input([prompt], message)
        text = tokenizers["tokenizer"].apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        ids = tokenizers["tokenizer"](text).input_ids
        check_length(prompt, len(ids) - TEMPLATE_START, max_sequence_length)
        words, byt5 = upstream.extract_glyph_texts(prompt), tokenizers["tokenizer_2"]
        glyphs = byt5(words, max_length=GLYPHS, truncation=True).input_ids if words else []
        return glyphs + [byt5.pad_token_id] * (GLYPHS - len(glyphs)) + ids

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        glyphs, ids = torch.tensor([prompt_ids], device=pipe.text_encoder.device).tensor_split((GLYPHS,), dim=1)
        states = pipe.text_encoder(
            input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True
        ).hidden_states
        embeds = states[-3][:, TEMPLATE_START:]
        there = glyphs != pipe.tokenizer_2.pad_token_id
        kept = max(1, int(there.sum()))
        words = pipe.text_encoder_2(input_ids=glyphs, attention_mask=there.float())[0] if there.any() else None
        nothing = embeds.new_zeros(1, 1, pipe.text_encoder_2.config.d_model)
        return {
            "prompt_embeds": embeds,
            "prompt_embeds_mask": torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device),
            "glyph_embeds": nothing if words is None else words[:, :kept],
            "glyph_embeds_mask": there[:, :kept],
        }

    @classmethod
    def conditions_like(cls, model_config: DiffusionModelConfig, tokens: int) -> Conditions:
        """Without words in quotes."""
        config, length = cls.transformer_config(model_config), tokens - GLYPHS - TEMPLATE_START
        return {
            "prompt_embeds": torch.zeros(1, length, config["text_embed_dim"]),
            "prompt_embeds_mask": torch.ones(1, length).bool(),
            "glyph_embeds": torch.zeros(1, 1, config["text_embed_2_dim"]),
            "glyph_embeds_mask": torch.zeros(1, 1).bool(),
        }

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        size, frames = model_config.pipeline, cls.num_frames(model_config)
        return pipe.prepare_latents(
            len(generators), module.config.out_channels, size.height, size.width, frames, torch.float32,
            generators[0].device, generators,
        )  # fmt: skip

    @classmethod
    def decode_latents(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        """One by one: the mask of the VAE's attention is for a single video."""
        latents = latents.to(pipe.vae.dtype) / pipe.vae.config.scaling_factor
        video = torch.cat([pipe.vae.decode(one, return_dict=False)[0] for one in latents.split(1)])
        return pipe.video_processor.postprocess_video(video, output_type="pt")

    @classmethod
    def check(cls, model_config: DiffusionModelConfig) -> None:
        guider = guider_config(model_config)
        for name, value in GUIDER.items():
            if guider.get(name, value) != value:
                raise ValueError(
                    f"the guider of {model_config.path} has {name}={guider[name]}: only plain classifier-free guidance "
                    f"is trained, {name}={value}"
                )
        frames = cls.num_frames(model_config)
        step = read_component_config(model_config.path, "vae")["temporal_compression_ratio"]
        if frames % step != 1 % step:
            raise ValueError(
                f"actor_rollout_ref.rollout.pipeline.num_frames={frames}: HunyuanVideo-1.5 makes {step}k + 1 frames, "
                f"such as {round((frames - 1) / step) * step + 1}"
            )
