"""Wan, text to video: latents (B, C, F, h, w), UMT5 with zeros for padding, and in Wan2.2 one transformer for high
noise and one for low. Both are trained: each sees the steps on its side of the boundary.
"""

from typing import Any

import numpy as np
import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.utils import (
    acts_with_other_ranks,
    check_length,
    read_component_config,
    read_index,
)
from verl_omni.pipelines.weights import build_component


class Experts(torch.nn.ModuleDict):
    """Wan2.2's two transformers: `transformer` from timestep `boundary` upwards, `transformer_2` below it."""

    def __init__(self, transformer: torch.nn.Module, transformer_2: torch.nn.Module, boundary: float):
        super().__init__({"transformer": transformer, "transformer_2": transformer_2})
        self.boundary = boundary

    def high_noise(self, timestep: torch.Tensor) -> torch.Tensor:
        """Which rows are the first transformer's; a timestep is (B,), or (B, tokens), where given frames have 0."""
        return timestep.reshape(len(timestep), -1)[:, -1] >= self.boundary


@DiffusionModelBase.register("WanPipeline", algorithm="flow_grpo")
class Wan(DiffusionModelBase):
    default_guidance = 5.0
    with_images = "WanImageToVideoPipeline"
    lora_target_modules = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
    fp8_modules = lora_target_modules
    trained_components = ("transformer", "transformer_2")

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        two = read_index(model_config.path).get("boundary_ratio") is not None
        return {"num_frames", "guidance_scale"} | ({"guidance_scale_2"} if two else set())

    @classmethod
    def num_frames(cls, model_config: DiffusionModelConfig) -> int:
        return 81 if model_config.pipeline.num_frames is None else model_config.pipeline.num_frames

    @classmethod
    def frame_rate(cls, model_config: DiffusionModelConfig) -> float:
        """Wan2.2-TI2V is the one that was trained at 24."""
        return 24.0 if read_index(model_config.path).get("expand_timesteps") else 16.0

    @classmethod
    def tokens(cls, model_config: DiffusionModelConfig) -> int:
        step = read_component_config(model_config.path, "vae")["scale_factor_temporal"]
        return ((cls.num_frames(model_config) - 1) // step + 1) * super().tokens(model_config)

    # Published folders come with UniPC, whose sigmas we walk with one-step methods.

    @classmethod
    def build_scheduler(cls, model_config: DiffusionModelConfig):
        from verl_omni.pipelines.schedulers import FlowMatchSDEDiscreteScheduler

        config = FlowMatchSDEDiscreteScheduler.load_config(model_config.path, subfolder="scheduler")
        if "flow_shift" not in config:
            return super().build_scheduler(model_config)
        return FlowMatchSDEDiscreteScheduler(config["num_train_timesteps"], shift=config["flow_shift"])

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        steps, train_steps = model_config.pipeline.num_inference_steps, scheduler.config.num_train_timesteps
        if "flow_shift" not in scheduler.load_config(model_config.path, subfolder="scheduler"):
            return super().set_timesteps(scheduler, model_config, device)
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / train_steps, steps + 1)[:-1], device=device)

    @classmethod
    def build_module(cls, model_config: DiffusionModelConfig, dtype: torch.dtype) -> torch.nn.Module:
        transformer = super().build_module(model_config, dtype)
        if read_index(model_config.path).get("boundary_ratio") is None:
            return transformer
        return cls.experts(model_config, transformer, build_component(model_config, "transformer_2", dtype))

    @classmethod
    def experts(
        cls, model_config: DiffusionModelConfig, transformer: torch.nn.Module, transformer_2: torch.nn.Module
    ) -> Experts:
        ratio = read_index(model_config.path)["boundary_ratio"]
        return Experts(transformer, transformer_2, ratio * cls.build_scheduler(model_config).config.num_train_timesteps)

    @classmethod
    def trained_modules(cls, module: torch.nn.Module) -> dict[str, torch.nn.Module]:
        return dict(module.items()) if isinstance(module, Experts) else {"transformer": module}

    @classmethod
    def parts_at(cls, module: torch.nn.Module, timesteps: torch.Tensor) -> set[str]:
        if not isinstance(module, Experts):
            return super().parts_at(module, timesteps)
        high = module.high_noise(timesteps)
        return {name for name, rows in (("transformer", high), ("transformer_2", ~high)) if rows.any()}

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        if read_index(model_config.path).get("expand_timesteps"):  # Wan2.2-TI2V: a timestep for each token
            frames, height, width = sample.shape[2:]
            timestep = timestep[:, None].expand(-1, frames * (height // 2) * (width // 2))
        missing = model_config.pipeline.max_sequence_length - prompt["prompt_embeds"].shape[1]
        return {
            "hidden_states": sample,
            "timestep": timestep,
            "encoder_hidden_states": torch.nn.functional.pad(prompt["prompt_embeds"], (0, 0, 0, missing)),
        }

    @classmethod
    def guidance(
        cls, module: torch.nn.Module, model_config: DiffusionModelConfig, model_inputs: dict[str, Any]
    ) -> float | torch.Tensor:
        first, second = cls.cfg_scale(model_config), model_config.pipeline.guidance_scale_2
        if second is None or not isinstance(module, Experts):
            return first
        high = module.high_noise(model_inputs["timestep"]).view(-1, 1, 1, 1, 1)
        return torch.where(high, first, second)

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        """With two transformers, every row goes through its own.

        Where ranks act together each has to call both, and one that has no rows for it gives it a row whose output
        counts for nothing.
        """
        if not isinstance(module, Experts):
            return super().forward(module, model_inputs)
        high = module.high_noise(model_inputs["timestep"])
        outputs, places, idle = [], [], 0.0
        for transformer, chosen in ((module["transformer"], high), (module["transformer_2"], ~high)):
            rows = chosen.nonzero().flatten()
            if len(rows):
                outputs.append(super().forward(transformer, {k: v[rows] for k, v in model_inputs.items()}))
                places.append(rows)
            elif acts_with_other_ranks(module):
                idle = 0.0 * super().forward(transformer, {k: v[:1] for k, v in model_inputs.items()}).sum()
        return torch.cat(outputs)[torch.cat(places).argsort()] + idle

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        ids = tokenizers["tokenizer"](prompt_clean(prompt)).input_ids
        check_length(prompt, len(ids), max_sequence_length)
        return ids

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        ids = torch.tensor([prompt_ids], device=pipe.text_encoder.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        return {"prompt_embeds": pipe.text_encoder(ids, mask).last_hidden_state, "prompt_embeds_mask": mask}

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        size, channels = model_config.pipeline, cls.trained_modules(module)["transformer"].config.in_channels
        frames, device = cls.num_frames(model_config), generators[0].device
        return pipe.prepare_latents(
            len(generators), channels, size.height, size.width, frames, torch.float32, device, generators
        )

    @classmethod
    def decode_latents(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        vae = pipe.vae
        mean, std = (
            torch.tensor(values, device=latents.device).view(1, vae.config.z_dim, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        video = vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0]
        return pipe.video_processor.postprocess_video(video, output_type="pt")

    @classmethod
    def check(cls, model_config: DiffusionModelConfig) -> None:
        super().check(model_config)
        step = read_component_config(model_config.path, "vae")["scale_factor_temporal"]
        frames = cls.num_frames(model_config)
        if frames % step != 1:
            nearest = round((frames - 1) / step) * step + 1
            raise ValueError(
                f"actor_rollout_ref.rollout.pipeline.num_frames={frames}: Wan makes {step}k + 1 frames, "
                f"such as {nearest}"
            )
