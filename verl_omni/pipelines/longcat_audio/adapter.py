"""LongCat-AudioDiT, text to sound: latents (B, time, C) of a waveform, UMT5, and a time that runs from noise to data.

Upstream's time is 1 - σ and its velocity data - noise: here both are turned round. Its text convolutions look beyond a
mask, so that only prompts of one length share a forward.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.utils import check_length, forward_in_groups, read_component_config
from verl_omni.utils.responses import Sound

MOST_SECONDS = 30.0  # upstream makes no more, whatever it is asked for


@DiffusionModelBase.register("LongCatAudioDiTPipeline", algorithm="flow_grpo")
class LongCatAudio(DiffusionModelBase):
    default_guidance = 4.0
    fp8_modules = ["to_q", "to_k", "to_v", "to_out.0", "ffn.ff.0", "ffn.ff.3"]
    size_multiple = 1
    pipeline_defaults = {"negative_prompt": "", "max_sequence_length": 512, "audio_duration_s": 10.0}

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return {"guidance_scale", "audio_duration_s"}

    @classmethod
    def makes(cls, model_config: DiffusionModelConfig) -> str:
        return "sound"

    @classmethod
    def vae_scale_factor(cls, model_config: DiffusionModelConfig) -> int:
        return 1  # it has no pixels

    @classmethod
    def tokens(cls, model_config: DiffusionModelConfig) -> int:
        vae, seconds = read_component_config(model_config.path, "vae"), model_config.pipeline.audio_duration_s
        return max(1, int(seconds * vae["sample_rate"] // vae["downsampling_ratio"]))

    @classmethod
    def build_scheduler(cls, model_config: DiffusionModelConfig):
        """Upstream neither saves one with the model nor reads it: it has always the same."""
        from verl_omni.pipelines.schedulers import FlowMatchSDEDiscreteScheduler

        return FlowMatchSDEDiscreteScheduler(shift=1.0)

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        steps = model_config.pipeline.num_inference_steps
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device)

    @classmethod
    def load_processors(cls, model_config: DiffusionModelConfig) -> dict[str, Any]:
        """Upstream's pipeline asks a transformer for its channels: one without blocks has them too."""
        from diffusers import FlowMatchEulerDiscreteScheduler, LongCatAudioDiTTransformer

        config = read_component_config(model_config.path, model_config.transformer_subfolder)
        empty = dict(config) | {"dit_depth": 0, "dit_dim": 8, "dit_heads": 1}
        scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, invert_sigmas=True)
        return {"transformer": LongCatAudioDiTTransformer.from_config(empty), "scheduler": scheduler}

    @classmethod
    def prepare_model_inputs(cls, *args: Any, **given: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Without a negative prompt upstream guides away from zeros, as many as the prompt has tokens."""
        mask = given["negative_prompt_embeds_mask"]
        if mask is not None:
            embeds, prompt_mask = given["negative_prompt_embeds"], given["prompt_embeds_mask"]
            length = max(mask.shape[1], prompt_mask.shape[1])
            mask, prompt_mask = (F.pad(m, (0, length - m.shape[1])) for m in (mask, prompt_mask))
            given["negative_prompt_embeds"] = F.pad(embeds, (0, 0, 0, length - embeds.shape[1]))
            given["negative_prompt_embeds_mask"] = torch.where(mask.any(1, keepdim=True), mask, prompt_mask)
        return super().prepare_model_inputs(*args, **given)

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
            "encoder_hidden_states": prompt["prompt_embeds"],
            "encoder_attention_mask": prompt["prompt_embeds_mask"],
            "timestep": 1 - timestep / 1000,
            "attention_mask": torch.ones(sample.shape[:2], dtype=torch.bool, device=sample.device),
            "latent_cond": torch.zeros_like(sample),
        }

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        """One call for all rows whose prompts are of one length."""
        lengths, call = model_inputs["encoder_attention_mask"].sum(dim=1).tolist(), super().forward

        def rows_of_one_length(rows: list[int]) -> torch.Tensor:
            chosen = {name: value[rows] for name, value in model_inputs.items()}
            for name in ("encoder_hidden_states", "encoder_attention_mask"):
                chosen[name] = chosen[name][:, : lengths[rows[0]]]
            return -call(module, chosen)

        return forward_in_groups(module, lengths, rows_of_one_length)

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        from diffusers.pipelines.longcat_audio_dit.pipeline_longcat_audio_dit import _normalize_text

        ids = tokenizers["tokenizer"](_normalize_text(prompt)).input_ids
        check_length(prompt, len(ids), max_sequence_length)
        return ids

    @classmethod
    def tokenize_negative(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        """As it is written. Nothing for an empty one, which is one that is not there."""
        ids = tokenizers["tokenizer"](prompt).input_ids if prompt else []
        check_length(prompt, len(ids), max_sequence_length)
        return ids

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        encoder = pipe.text_encoder
        if not prompt_ids:
            nothing = torch.zeros(1, 1, encoder.config.d_model, device=encoder.device, dtype=encoder.dtype)
            return {"prompt_embeds": nothing, "prompt_embeds_mask": nothing[..., 0].bool()}
        ids = torch.tensor([prompt_ids], device=encoder.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        states = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        last, first = (
            F.layer_norm(h, h.shape[-1:], eps=1e-6) for h in (states.last_hidden_state, states.hidden_states[0])
        )
        return {"prompt_embeds": last + first, "prompt_embeds_mask": mask}

    @classmethod
    def conditions_like(cls, model_config: DiffusionModelConfig, tokens: int) -> Conditions:
        width = cls.transformer_config(model_config)["dit_text_dim"]
        return {"prompt_embeds": torch.zeros(1, tokens, width), "prompt_embeds_mask": torch.ones(1, tokens).bool()}

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        frames, device = cls.tokens(model_config), generators[0].device
        latents = torch.empty(len(generators), frames, module.config.latent_dim, device=device)
        for row, generator in zip(latents, generators, strict=True):
            row.copy_(torch.randn(row.shape, generator=generator, device=device))
        return latents

    @classmethod
    def latents_by_place(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        """(B, channels, time)."""
        return latents.mT

    @classmethod
    def decode_latents(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        """Waves (B, channels, time)."""
        return pipe.vae.decode(cls.latents_by_place(pipe, latents, model_config)).sample

    @classmethod
    def responses(cls, decoded: torch.Tensor, pipe: Any, model_config: DiffusionModelConfig) -> list[Sound]:
        return [Sound(wave.clamp(-1, 1).cpu(), pipe.vae.config.sample_rate) for wave in decoded]

    @classmethod
    def check(cls, model_config: DiffusionModelConfig) -> None:
        seconds = model_config.pipeline.audio_duration_s
        if seconds is not None and seconds > MOST_SECONDS:
            raise ValueError(
                f"actor_rollout_ref.rollout.pipeline.audio_duration_s={seconds:g}: LongCat-AudioDiT makes at most "
                f"{MOST_SECONDS:g} seconds"
            )
