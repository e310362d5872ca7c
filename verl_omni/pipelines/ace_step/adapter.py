"""ACE-Step 1.5, text to music: latents (B, time, C) of a waveform, beside those of silence.

Upstream writes the duration into the text: the ids of a prompt are its bytes here, and tokens are made when it is
encoded. Its cross attention has no mask: only prompts of one length share a forward.
"""

import math
from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.utils import check_length, forward_by_length, read_component_config
from verl_omni.utils.responses import Sound

LYRICS = "<lyrics>"  # in a prompt, before the words that are sung
SHIFT, MOST_LYRICS = 3.0, 2048  # as upstream has them where nobody says otherwise
TIMBRE_SECONDS = 30


@DiffusionModelBase.register("AceStepPipeline", algorithm="flow_grpo")
class AceStep(DiffusionModelBase):
    fp8_modules = ["to_q", "to_k", "to_v", "to_out.0", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    size_multiple = 1
    shares_tokens = False
    libraries = ("ace_step",)  # diffusers' own, of the encoder of conditions
    pipeline_defaults = {"negative_prompt": "", "max_sequence_length": 256, "audio_duration_s": 60.0}

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return {"audio_duration_s"} if cls._is_turbo(model_config) else {"audio_duration_s", "guidance_scale"}

    @classmethod
    def _is_turbo(cls, model_config: DiffusionModelConfig) -> bool:
        config = cls.transformer_config(model_config)
        return bool(config.get("is_turbo") or config.get("model_version") == "turbo")

    @classmethod
    def makes(cls, model_config: DiffusionModelConfig) -> str:
        return "sound"

    @classmethod
    def vae_scale_factor(cls, model_config: DiffusionModelConfig) -> int:
        return 1  # it has no pixels

    @classmethod
    def frames(cls, model_config: DiffusionModelConfig) -> int:
        """Latents of a sample."""
        vae = read_component_config(model_config.path, "vae")
        rate = vae["sampling_rate"] / math.prod(vae["downsampling_ratios"])
        return math.ceil(model_config.pipeline.audio_duration_s * rate)

    @classmethod
    def tokens(cls, model_config: DiffusionModelConfig) -> int:
        return math.ceil(cls.frames(model_config) / cls.transformer_config(model_config)["patch_size"])

    @classmethod
    def cfg_scale(cls, model_config: DiffusionModelConfig) -> float:
        return 1.0

    @classmethod
    def build_module(cls, model_config: DiffusionModelConfig, dtype: torch.dtype) -> torch.nn.Module:
        module = super().build_module(model_config, dtype)
        module._repeated_blocks = ["AceStepTransformerBlock"]  # which diffusers does not name
        return module

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        t = torch.linspace(1.0, 0.0, model_config.pipeline.num_inference_steps + 1)[:-1]
        scheduler.set_timesteps(sigmas=(SHIFT * t / (1 + (SHIFT - 1) * t)).tolist(), device=device)

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        silence = prompt["silence"][:, : sample.shape[1]]
        return {
            "hidden_states": sample,
            "timestep": timestep,
            "timestep_r": timestep,
            "encoder_hidden_states": prompt["prompt_embeds"],
            "mask": prompt["prompt_embeds_mask"],
            "context_latents": torch.cat([silence, torch.ones_like(silence)], dim=-1),
        }

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        return forward_by_length(module, model_inputs, "mask", super().forward)

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        """The bytes of the prompt. The duration, of which the text tells, has four digits at most."""
        from diffusers import AceStepPipeline

        caption, _, lyrics = prompt.partition(LYRICS)
        texts = AceStepPipeline._format_prompt(AceStepPipeline, caption, lyrics, audio_duration=9999)
        for text, most in zip(texts, (max_sequence_length, MOST_LYRICS), strict=True):
            check_length(prompt, len(tokenizers["tokenizer"](text).input_ids), most)
        return list(prompt.encode())

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        caption, _, lyrics = bytes(prompt_ids).decode().partition(LYRICS)
        encoder, length = pipe.condition_encoder, cls.frames(model_config)
        seconds, device, dtype = model_config.pipeline.audio_duration_s, pipe.text_encoder.device, encoder.dtype
        text, text_mask, sung, sung_mask = pipe.encode_prompt(
            caption, lyrics, device, audio_duration=seconds, max_text_length=model_config.pipeline.max_sequence_length
        )
        timbre = encoder.silence_latent[:, : math.ceil(TIMBRE_SECONDS * pipe.latents_per_second)].to(dtype)
        first = torch.zeros(1, dtype=torch.long, device=device)
        embeds, _ = encoder(text, text_mask, sung, sung_mask, timbre, first)
        silence, _ = pipe.prepare_src_latents(device, dtype, latent_length=length)
        return {
            "prompt_embeds": embeds,
            "prompt_embeds_mask": torch.ones(embeds.shape[:2], dtype=torch.bool, device=device),
            "silence": silence,
        }

    @classmethod
    def conditions_like(cls, model_config: DiffusionModelConfig, tokens: int) -> Conditions:
        """`tokens` are bytes, and of a byte the tokenizer makes one at most. The timbre has one too."""
        from diffusers import AceStepPipeline

        tokenizer, seconds = cls.load_tokenizers(model_config)["tokenizer"], model_config.pipeline.audio_duration_s
        around = AceStepPipeline._format_prompt(AceStepPipeline, "", "", audio_duration=seconds)
        config, length = cls.transformer_config(model_config), sum(map(len, tokenizer(around).input_ids)) + tokens + 1
        width = config.get("encoder_hidden_size") or config["hidden_size"]
        return {
            "prompt_embeds": torch.zeros(1, length, width),
            "prompt_embeds_mask": torch.ones(1, length).bool(),
            "silence": torch.zeros(1, cls.frames(model_config), config["audio_acoustic_hidden_dim"]),
        }

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        shape, device = (cls.frames(model_config), module.config.audio_acoustic_hidden_dim), generators[0].device
        return torch.stack([torch.randn(shape, generator=generator, device=device) for generator in generators])

    @classmethod
    def latents_by_place(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        return latents.transpose(1, 2)

    @classmethod
    def decode_latents(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        """Waves (B, channels, time), each as loud as upstream makes it: its peak is 1 dB below the most."""
        placed = cls.latents_by_place(pipe, latents, model_config)
        wave = pipe.vae.decode(placed.to(pipe.vae.dtype)).sample.float()
        wave = wave / wave.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1.0)
        return wave * (10 ** (-1 / 20) / wave.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1e-6))

    @classmethod
    def responses(cls, decoded: torch.Tensor, pipe: Any, model_config: DiffusionModelConfig) -> list[Sound]:
        return [Sound(wave.clamp(-1, 1).cpu(), pipe.sample_rate) for wave in decoded]

    @classmethod
    def check(cls, model_config: DiffusionModelConfig) -> None:
        scale = model_config.pipeline.guidance_scale
        if not cls._is_turbo(model_config) and (scale is None or scale > 1):
            given = "" if scale is None else f"={scale:g}"
            raise ValueError(
                f"actor_rollout_ref.rollout.pipeline.guidance_scale{given}: ACE-Step's guidance has a momentum over "
                "steps, so that none of them can be trained alone: set guidance_scale=1, or train a turbo model"
            )
        if (model_config.pipeline.negative_prompt or "").strip():
            raise ValueError(
                "actor_rollout_ref.rollout.pipeline.negative_prompt: ACE-Step reads none; leave it out"
            )
