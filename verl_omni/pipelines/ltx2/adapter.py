"""LTX-2, text to video with sound: both are denoised together, by one transformer and in the same steps.

A sample is one sequence (B, tokens, C): the video's latents, then the sound's, which have as many channels. So all that
steps, stores, replays and trains sees one sample. `guidance_scale` is the video's and `audio_guidance_scale` the
sound's. Upstream mixes the halves as predictions of x0, which for one σ is the same as mixing velocities. Of the log-
probability of a step the sound has `rollout.algo.audio_share`, or what its number of latents comes to.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.shared_tokens import TokenPlan
from verl_omni.pipelines.utils import audio_weights, check_length, diffusers_since, flow_shift, read_component_config
from verl_omni.utils.responses import VideoWithSound, videos_with_sound

AUDIO_STEP = 4  # of the spectrogram, in time, a latent; upstream has it as a constant
FRAME_RATE = 24.0


@dataclass(frozen=True)
class Geometry:
    """Of a sample's latents."""

    frames: int
    rows: int
    columns: int
    sound: int
    #: frames that come with the prompt: they are seen, and neither drawn nor stepped
    given: int = 0

    @property
    def video(self) -> int:
        return self.frames * self.rows * self.columns

    @property
    def drawn(self) -> int:
        return self.video - self.given * self.rows * self.columns


@DiffusionModelBase.register("LTX2Pipeline", algorithm="flow_grpo")
class LTX2(DiffusionModelBase):
    with_images = "LTX2ImageToVideoPipeline"
    lora_target_modules = [
        "to_q", "to_k", "to_v", "to_out.0",
        "ff.net.0.proj", "ff.net.2", "audio_ff.net.0.proj", "audio_ff.net.2",
    ]  # fmt: skip
    fp8_modules = lora_target_modules
    libraries = ("ltx2",)  # diffusers' own, of the connectors and the vocoder
    size_multiple = 1
    pipeline_defaults = {"negative_prompt": "", "max_sequence_length": 1024}

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return {"num_frames", "frame_rate", "guidance_scale", "audio_guidance_scale"}

    @classmethod
    def makes(cls, model_config: DiffusionModelConfig) -> str:
        return "video with sound"

    @classmethod
    def frame_rate(cls, model_config: DiffusionModelConfig) -> float:
        return model_config.pipeline.frame_rate or FRAME_RATE

    # ---- sizes ---------------------------------------------------------------------------------------

    @classmethod
    def _ratio(cls, model_config: DiffusionModelConfig, direction: str, patch: str) -> int:
        vae = read_component_config(model_config.path, "vae")
        told = vae.get(f"{direction}_compression_ratio")
        return told or vae[patch] * 2 ** sum(vae["spatio_temporal_scaling"])

    @classmethod
    def vae_scale_factor(cls, model_config: DiffusionModelConfig) -> int:
        return cls._ratio(model_config, "spatial", "patch_size")

    @classmethod
    def geometry(cls, model_config: DiffusionModelConfig) -> Geometry:
        size, audio = model_config.pipeline, read_component_config(model_config.path, "audio_vae")
        frames, step = size.num_frames or 121, cls._ratio(model_config, "temporal", "patch_size_t")
        seconds = frames / cls.frame_rate(model_config)
        sound = round(seconds * (audio["sample_rate"] / audio["mel_hop_length"] / float(AUDIO_STEP)))
        return Geometry((frames - 1) // step + 1, *cls.grid(model_config), sound, int(cls.needs_images))

    @classmethod
    def tokens(cls, model_config: DiffusionModelConfig) -> int:
        size = cls.geometry(model_config)
        return size.drawn + size.sound

    @classmethod
    def shared_tokens(cls, model_config: DiffusionModelConfig) -> int:
        return cls.geometry(model_config).drawn

    @classmethod
    def token_plan(cls, part: torch.nn.Module) -> TokenPlan:
        """The video's tokens: every rank has all of the sound and of the prompt, which are few.

        diffusers' own plan cuts the prompt's mask, which its joined keys need whole, leaves the video's positions whole
        where it meets the sound, and has no gradient of an attention from one length to another.
        """
        from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

        axis, dims = (2, 4) if part.config.rope_type == "split" else (1, 3)
        positions = {i: ContextParallelInput(split_dim=axis, expected_dims=dims, split_output=True) for i in range(2)}
        cuts = {
            "": {"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3)},
            "rope": positions,
            "cross_attn_rope": positions,
            "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
        }
        return TokenPlan(cuts, exchange=("attn1",), gather=("video_to_audio_attn",), whole=(1,))

    # ---- training and rollout ------------------------------------------------------------------------

    @classmethod
    def build_scheduler(cls, model_config: DiffusionModelConfig):
        scheduler, share = super().build_scheduler(model_config), model_config.algo.audio_share
        if share is not None:
            size = cls.geometry(model_config)
            scheduler.log_prob_weights = audio_weights(share, size.drawn, size.sound)
        return scheduler

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        steps, config = model_config.pipeline.num_inference_steps, scheduler.config
        # Until 0.40 upstream shifted the schedule of every size as that of the largest.
        length = cls.geometry(model_config).video if diffusers_since("0.40") else config["max_image_seq_len"]
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=flow_shift(length, config), device=device)

    @classmethod
    def scales(cls, model_config: DiffusionModelConfig) -> tuple[float, float]:
        """Guidance of the video and of the sound."""
        pipeline = model_config.pipeline
        video = 4.0 if pipeline.guidance_scale is None else pipeline.guidance_scale
        return video, video if pipeline.audio_guidance_scale is None else pipeline.audio_guidance_scale

    @classmethod
    def cfg_scale(cls, model_config: DiffusionModelConfig) -> float:
        return max(cls.scales(model_config))

    @classmethod
    def guidance(
        cls, module: torch.nn.Module, model_config: DiffusionModelConfig, model_inputs: dict[str, Any]
    ) -> torch.Tensor:
        size, scales = cls.geometry(model_config), torch.tensor(cls.scales(model_config))
        counts = torch.tensor([size.drawn, size.sound])
        return scales.repeat_interleave(counts)[:, None].to(model_inputs["timestep"].device)

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        size, config = cls.geometry(model_config), module.config
        video, sound = sample.split([size.drawn, size.sound], dim=1)
        shape, rate = (size.frames, size.rows, size.columns), cls.frame_rate(model_config)
        return {
            "hidden_states": video,
            "audio_hidden_states": sound,
            "encoder_hidden_states": prompt["prompt_embeds"],
            "audio_encoder_hidden_states": prompt["audio_prompt_embeds"],
            "timestep": timestep,
            "sigma": timestep,
            "encoder_attention_mask": prompt["prompt_embeds_mask"],
            "audio_encoder_attention_mask": prompt["prompt_embeds_mask"],
            "video_coords": module.rope.prepare_video_coords(len(sample), *shape, sample.device, fps=rate),
            "audio_coords": module.audio_rope.prepare_audio_coords(len(sample), size.sound, sample.device),
            "use_cross_timestep": bool(config.cross_attn_mod or config.audio_cross_attn_mod),  # LTX-2.3
        }

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        return torch.cat(module(**model_inputs, return_dict=False), dim=1)

    # ---- prompts, videos and sounds ------------------------------------------------------------------

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        ids = tokenizers["tokenizer"](prompt.strip()).input_ids
        check_length(prompt, len(ids), max_sequence_length)
        return ids

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        """Padded on the left to `max_sequence_length`: the connectors put learned tokens where padding is."""
        missing = model_config.pipeline.max_sequence_length - len(prompt_ids)
        padding, device = [pipe.tokenizer.pad_token_id] * missing, pipe.text_encoder.device
        ids = torch.tensor([padding + prompt_ids], device=device)
        mask = (torch.arange(ids.shape[1], device=device) >= missing).long()[None]
        states = pipe.text_encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        features = torch.stack(states, dim=-1).flatten(2, 3)
        video, sound, mask = pipe.connectors(features, mask, padding_side="left")
        return {"prompt_embeds": video, "audio_prompt_embeds": sound, "prompt_embeds_mask": mask}

    @classmethod
    def conditions_like(cls, model_config: DiffusionModelConfig, tokens: int) -> Conditions:
        connectors = read_component_config(model_config.path, "connectors")
        length = model_config.pipeline.max_sequence_length
        widths = (
            connectors[f"{kind}_connector_num_attention_heads"] * connectors[f"{kind}_connector_attention_head_dim"]
            for kind in ("video", "audio")
        )
        video, sound = (torch.zeros(1, length, width) for width in widths)
        mask = torch.ones(1, length, dtype=torch.long)
        return {"prompt_embeds": video, "audio_prompt_embeds": sound, "prompt_embeds_mask": mask}

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        from diffusers.utils.torch_utils import randn_tensor

        size, audio, count = cls.geometry(model_config), pipe.audio_vae.config, len(generators)
        bins = audio.mel_bins // pipe.audio_vae_mel_compression_ratio
        video, sound = (
            randn_tensor(shape, generators, generators[0].device, torch.float32)
            for shape in (
                (count, module.config.in_channels, size.frames, size.rows, size.columns),
                (count, audio.latent_channels, size.sound, bins),
            )
        )
        video, sound = pipe._pack_latents(video), pipe._pack_audio_latents(sound)
        return torch.cat([video[:, size.video - size.drawn :], sound], dim=1)

    @classmethod
    def decode_latents(
        cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Videos (B, F, 3, H, W) in [0, 1], and waves (B, channels, time)."""
        size, vae, audio_vae = cls.geometry(model_config), pipe.vae, pipe.audio_vae
        video, sound = latents.split([size.video, size.sound], dim=1)
        video = pipe._unpack_latents(video, size.frames, size.rows, size.columns)
        video = pipe._denormalize_latents(video, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        pixels = vae.decode(video.to(vae.dtype), None, return_dict=False)[0]
        sound = pipe._denormalize_audio_latents(sound, audio_vae.latents_mean, audio_vae.latents_std)
        bins = audio_vae.config.mel_bins // pipe.audio_vae_mel_compression_ratio
        spectrogram = pipe._unpack_audio_latents(sound, size.sound, num_mel_bins=bins).to(audio_vae.dtype)
        waves = pipe.vocoder(audio_vae.decode(spectrogram, return_dict=False)[0])
        return pipe.video_processor.postprocess_video(pixels, output_type="pt"), waves

    @classmethod
    def responses(
        cls, decoded: tuple[torch.Tensor, torch.Tensor], pipe: Any, model_config: DiffusionModelConfig
    ) -> list[VideoWithSound]:
        return videos_with_sound(decoded, pipe.vocoder.config.output_sampling_rate, cls.frame_rate(model_config))

    @classmethod
    def check(cls, model_config: DiffusionModelConfig) -> None:
        config = read_component_config(model_config.path, model_config.transformer_subfolder)
        if config["in_channels"] != config["audio_in_channels"]:
            raise ValueError(
                f"this LTX-2 has {config['in_channels']} channels of video and {config['audio_in_channels']} of sound: "
                "expected as many, so that they are one sequence"
            )
        if read_component_config(model_config.path, "vae").get("timestep_conditioning"):
            raise ValueError("this LTX-2 decodes with noise (timestep_conditioning of its VAE), which is not supported")
        frames, step = model_config.pipeline.num_frames or 121, cls._ratio(model_config, "temporal", "patch_size_t")
        if frames % step != 1 % step:
            raise ValueError(
                f"actor_rollout_ref.rollout.pipeline.num_frames={frames}: LTX-2 makes {step}k + 1 frames, such as "
                f"{round((frames - 1) / step) * step + 1}"
            )


@DiffusionModelBase.register("LTX2ImageToVideoPipeline", algorithm="flow_grpo")
class LTX2ImageToVideo(LTX2):
    """The first frame comes with the prompt. Its latents stand before the others, at timestep 0.

    Upstream since 0.40 compresses it as a video first, if it is not told `image_crf=0`: here it is as it was given.
    """

    about = "LTX-2, an image to video with sound"
    needs_images = True
    shares_tokens = False  # each token has a timestep of its own

    @classmethod
    def images_of_a_prompt(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        return 1, 1

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        inputs = super().model_inputs(module, model_config, sample, timestep, prompt)
        first, size = prompt["first_frame"].to(sample.dtype), cls.geometry(model_config)
        given = timestep.new_zeros(first.shape[:2])
        return inputs | {
            "hidden_states": torch.cat([first, inputs["hidden_states"]], dim=1),
            "timestep": torch.cat([given, timestep[:, None].expand(-1, size.drawn)], dim=1),
            "audio_timestep": timestep,
            "given": [first.shape[1]] * len(sample),
        }

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        inputs = dict(model_inputs)
        given = inputs.pop("given")
        return super().forward(module, inputs)[:, given[0] :]

    @classmethod
    def encode_images(cls, pipe, images: list[Any] | None, model_config: DiffusionModelConfig) -> Conditions:
        if images is None or len(images) != 1:
            raise ValueError(
                "LTX-2, image to video, needs one first frame with every prompt, in the data's column `images`, and "
                f"this one has {len(images or ())}"
            )
        vae, size = pipe.vae, model_config.pipeline
        pixels = pipe.video_processor.preprocess(images[0], height=size.height, width=size.width)
        latents = vae.encode(pixels[:, :, None].to(vae.device, vae.dtype)).latent_dist.mode().float()
        latents = pipe._normalize_latents(latents, vae.latents_mean, vae.latents_std)
        return {"first_frame": pipe._pack_latents(latents)}

    @classmethod
    def images_like(cls, model_config: DiffusionModelConfig) -> Conditions:
        size, channels = cls.geometry(model_config), cls.transformer_config(model_config)["in_channels"]
        return {"first_frame": torch.zeros(1, size.rows * size.columns, channels)}

    @classmethod
    def whole_latents(cls, latents: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        return torch.cat([conditions["first_frame"].to(latents.dtype), latents], dim=1)
