"""MiniMax-H3, text to video with sound: one transformer, and one sequence for prompt, sound and video.

A sample is one sequence (B, N, C). A token of the video has 96 numbers and one of the sound 32: here C is what both can
be divided by, and a token of the video is three entries. The two are at noise levels of their own in each step, by a
shift of 12 and one of 3: the schedule's σ is the video's, and `sound_level` follows from it. Upstream's time is 1 - σ
and its velocity data - noise: here both are turned round. It has neither guidance nor negative prompts.
"""

import functools
import math
import os
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.utils import (
    audio_weights,
    check_length,
    diffusers_since,
    forward_in_groups,
    read_component_config,
)
from verl_omni.utils.json_files import read_object
from verl_omni.utils.responses import VideoWithSound, videos_with_sound

FRAMES = 124
VIDEO, TEXT, SOUND = range(3)  # what the transformer calls the rows of each
CHANNELS = 2  # of the sound
SCHEDULERS = ("scheduler", "audio_scheduler")


@dataclass(frozen=True)
class Geometry:
    """Of a sample's latents: the video's pixels, the sound's steps in each channel, and the numbers of a token."""

    frames: int
    height: int
    width: int
    steps: int
    patch: tuple[int, int, int]
    video_width: int
    sound_width: int

    @property
    def latents(self) -> tuple[int, int, int]:
        return self.frames, self.height, self.width

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(size // part for size, part in zip(self.latents, self.patch, strict=True))

    @property
    def video(self) -> int:
        return math.prod(self.grid)

    @property
    def sound(self) -> int:
        return CHANNELS * self.steps

    @property
    def entry(self) -> int:
        return math.gcd(self.video_width, self.sound_width)

    @property
    def entries(self) -> list[int]:
        """Of the video and of the sound."""
        return [self.video * self.video_width // self.entry, self.sound * self.sound_width // self.entry]


@DiffusionModelBase.register("MiniMaxH3ModularPipeline", algorithm="flow_grpo")
class MiniMaxH3(DiffusionModelBase):
    modular_parts = ("transformer", "vae", "audio_vae", "text_encoder", "tokenizer", *SCHEDULERS)
    fp8_modules = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
    pipeline_defaults = {"negative_prompt": "", "max_sequence_length": 1024}
    shares_tokens = False  # ranks would have to cut the joined sequence of prompt, sound and video

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return {"num_frames"}

    @classmethod
    def makes(cls, model_config: DiffusionModelConfig) -> str:
        return "video with sound"

    @classmethod
    def frame_rate(cls, model_config: DiffusionModelConfig) -> float:
        return 24.0

    # ---- sizes ---------------------------------------------------------------------------------------

    @classmethod
    def vae_scale_factor(cls, model_config: DiffusionModelConfig) -> int:
        return math.prod(read_component_config(model_config.path, "vae")["spatial_downsample_factors"])

    @classmethod
    def geometry(cls, model_config: DiffusionModelConfig) -> Geometry:
        from diffusers.modular_pipelines.minimax_h3 import modular_pipeline as upstream

        size, config = model_config.pipeline, cls.transformer_config(model_config)
        frames, patch = size.num_frames or FRAMES, tuple(config["patch_size"])
        scale = cls.vae_scale_factor(model_config)
        return Geometry(
            upstream.video_latent_num_frames(frames, *cls._chunk(model_config)),
            size.height // scale,
            size.width // scale,
            upstream.audio_latent_num_frames(frames),
            patch,
            config["in_channels"] * math.prod(patch),
            config["audio_in_channels"],
        )

    @classmethod
    def _chunk(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        """Frames that the VAE sees at once, and the latents that it makes of them."""
        vae = read_component_config(model_config.path, "vae")
        return vae["clip_length"], math.ceil(vae["clip_length"] / math.prod(vae["temporal_downsample_factors"]))

    @classmethod
    def tokens(cls, model_config: DiffusionModelConfig) -> int:
        size = cls.geometry(model_config)
        return size.video + size.sound

    # ---- training and rollout ------------------------------------------------------------------------

    @classmethod
    def sound_level(cls, sigma: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        """The sound's σ where the video's is this: both are one level, shifted."""
        video, sound = shifts(model_config.path)
        ratio = sound / video
        return ratio * sigma / (ratio * sigma + (1 - sigma))

    @classmethod
    def build_scheduler(cls, model_config: DiffusionModelConfig):
        from verl_omni.pipelines.schedulers import FlowMatchSDEDiscreteScheduler

        scheduler = FlowMatchSDEDiscreteScheduler(shift=shifts(model_config.path)[0])
        entries, share = cls.geometry(model_config).entries, model_config.algo.audio_share
        if share is not None:
            scheduler.log_prob_weights = audio_weights(share, *entries)

        def levels_at(sigma: torch.Tensor) -> torch.Tensor:
            both = sigma, cls.sound_level(sigma, model_config)
            return torch.cat([one[:, None].expand(-1, count) for one, count in zip(both, entries, strict=True)], dim=1)

        scheduler.levels_at = levels_at
        return scheduler

    @classmethod
    def num_steps(cls, model_config: DiffusionModelConfig) -> int:
        return model_config.pipeline.num_inference_steps - 1  # upstream counts the end, σ = 0, too

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        levels = np.linspace(1.0, 0.0, max(2, model_config.pipeline.num_inference_steps))
        scheduler.set_timesteps(sigmas=levels[:-1], device=device)

    @classmethod
    def cfg_scale(cls, model_config: DiffusionModelConfig) -> float:
        return 1.0

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        size, sigma = cls.geometry(model_config), timestep / 1000
        video, sound = sample.split(size.entries, dim=1)
        return {
            "hidden_states": video.reshape(len(sample), size.video, -1),
            "audio_hidden_states": sound.reshape(len(sample), size.sound, -1),
            "encoder_hidden_states": prompt["prompt_embeds"],
            "encoder_attention_mask": prompt["prompt_embeds_mask"],
            "timestep": 1 - sigma,
            "audio_timestep": 1 - cls.sound_level(sigma, model_config),
            "geometry": [size] * len(sample),
            "moment": timestep.view(torch.int32),  # a whole number for who has to know which rows are at one time
        }

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        """One call for all rows at one time whose prompts are of one length."""
        lengths, size = model_inputs["encoder_attention_mask"].sum(dim=1).tolist(), model_inputs["geometry"][0]
        times = torch.stack([model_inputs["timestep"], model_inputs["audio_timestep"]], dim=1)

        def rows_of_one_kind(rows: list[int]) -> torch.Tensor:
            length, device = lengths[rows[0]], times.device
            layout = packed_sequence(length, size, device)
            both = module(
                hidden_states=model_inputs["hidden_states"][rows],
                audio_hidden_states=model_inputs["audio_hidden_states"][rows],
                encoder_hidden_states=model_inputs["encoder_hidden_states"][rows, :length],
                timestep=times[rows[0]],
                timestep_indices=(layout["token_tags"] == SOUND).long(),
                return_dict=False,
                **layout,
            )
            return -torch.cat([part.reshape(len(rows), -1, size.entry) for part in both], dim=1)

        kinds = list(zip(lengths, model_inputs["moment"].tolist(), strict=True))
        return forward_in_groups(module, kinds, rows_of_one_kind)

    # ---- prompts, videos and sounds ------------------------------------------------------------------

    @classmethod
    def load_processors(cls, model_config: DiffusionModelConfig) -> dict[str, Any]:
        """What upstream's pipeline has beside: the first reads images of a prompt."""
        return dict.fromkeys(("processor", *SCHEDULERS))

    @classmethod
    def load_tokenizers(cls, model_config: DiffusionModelConfig) -> dict[str, Any]:
        from transformers import Qwen2Tokenizer

        folder = os.path.join(os.path.expanduser(model_config.tokenizer_path or model_config.path), "tokenizer")
        return {"tokenizer": Qwen2Tokenizer.from_pretrained(folder)}

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        ids = tokenizers["tokenizer"](prompt, add_special_tokens=False).input_ids
        check_length(prompt, len(ids), max_sequence_length)
        if not ids:
            raise ValueError("a prompt is empty, and MiniMax-H3 draws nothing without one: give it a text")
        return ids

    @classmethod
    def tokenize_negative(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        """Nothing: it has no guidance."""
        if prompt.strip():
            raise ValueError(f'negative_prompt="{prompt[:80]}": MiniMax-H3 reads none; leave it out')
        return []

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        ids = torch.tensor([prompt_ids], device=pipe.text_encoder.device)
        mask = torch.ones_like(ids)
        states = pipe.text_encoder(
            input_ids=ids,
            attention_mask=mask,
            mm_token_type_ids=torch.zeros_like(ids),  # text alone
            use_cache=False,
            output_hidden_states=True,
            logits_to_keep=1,
        ).hidden_states
        return {"prompt_embeds": states[pipe.text_encoder_layer], "prompt_embeds_mask": mask.bool()}

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents
        from diffusers.utils.torch_utils import randn_tensor

        size, count = cls.geometry(model_config), len(generators)
        video, sound = (
            randn_tensor(shape, generators, generators[0].device, torch.float32)
            for shape in (
                (count, module.config.in_channels, *size.latents),
                (count, size.sound, size.sound_width),
            )
        )
        both = patchify_video_latents(video, size.patch), sound
        return torch.cat([part.reshape(count, -1, size.entry) for part in both], dim=1)

    @classmethod
    def decode_latents(
        cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Videos (B, F, 3, H, W) in [0, 1], and waves (B, channels, time)."""
        size, count = cls.geometry(model_config), len(latents)
        video, sound = latents.split(size.entries, dim=1)
        video = video.reshape(count, *size.grid, -1, *size.patch).permute(0, 4, 1, 5, 2, 6, 3, 7)
        video = video.reshape(count, -1, *size.latents)
        pixels = pipe.vae.decode(in_units_of(pipe.vae, video), return_dict=False)[0].float()
        mean, std = (pixels.new_tensor(values)[:, None, None, None] for values in (pipe.pixel_mean, pipe.pixel_std))
        sound = sound.reshape(count * CHANNELS, size.steps, size.sound_width).mT
        waves = pipe.audio_vae.decode(in_units_of(pipe.audio_vae, sound), return_dict=False)[0]
        return (pixels * std + mean).clamp(0, 1).transpose(1, 2), waves.float().reshape(count, CHANNELS, -1)

    @classmethod
    def responses(
        cls, decoded: tuple[torch.Tensor, torch.Tensor], pipe: Any, model_config: DiffusionModelConfig
    ) -> list[VideoWithSound]:
        return videos_with_sound(decoded, pipe.audio_vae.config.sampling_rate, cls.frame_rate(model_config))

    @classmethod
    def check(cls, model_config: DiffusionModelConfig) -> None:
        check_diffusers()
        negative = (model_config.pipeline.negative_prompt or "").strip()
        if negative:
            raise ValueError(
                f'actor_rollout_ref.rollout.pipeline.negative_prompt="{negative[:80]}": MiniMax-H3 reads none; leave '
                "it out"
            )
        frames, (step, rest) = model_config.pipeline.num_frames or FRAMES, cls._chunk(model_config)
        if frames % step != rest or frames < step:
            near = max(1, round((frames - rest) / step)) * step + rest
            raise ValueError(
                f"actor_rollout_ref.rollout.pipeline.num_frames={frames}: MiniMax-H3 makes {step}k + {rest} frames, "
                f"such as {near}"
            )


def check_diffusers() -> None:
    if not diffusers_since("0.40"):
        raise ValueError(f"MiniMax-H3 needs diffusers 0.40 or later, and {version('diffusers')} is installed")


@functools.lru_cache(maxsize=64)
def shifts(path: str) -> tuple[float, float]:
    """Of the noise schedules of the video and of the sound."""
    files = (os.path.join(os.path.expanduser(path), name, "scheduler_config.json") for name in SCHEDULERS)
    video, sound = (read_object(file)["shift"] for file in files)
    return video, sound


def packed_sequence(length: int, size: Geometry, device: torch.device) -> dict[str, torch.Tensor]:
    """Where prompt, sound and video stand in the sequence, and in time and space."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    text = torch.full((length,), TEXT)
    found = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        text, *size.latents, size.steps, size.patch, CHANNELS, SOUND, VIDEO
    )
    names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    return {name: value.to(device) for name, value in zip(names, found, strict=False)}


def in_units_of(vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, ...) as the VAE has them: each channel has a mean and a width."""
    channels = (-1, *[1] * (latents.ndim - 2))
    mean, std = (latents.new_tensor(v).reshape(channels) for v in (vae.config.latents_mean, vae.config.latents_std))
    return latents * std + mean
