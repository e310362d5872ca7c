"""Wan, image to video: a first frame, and for some models a last one, is given with the prompt.

Wan2.1 and Wan2.2-I2V see given frames as more channels beside the latents, Wan2.1 as CLIP features too. Wan2.2-TI2V
(`expand_timesteps`) has the first frame among the latents, at timestep 0: there only the frames after it are drawn,
stepped and trained. A folder of Wan2.2-TI2V says WanPipeline, for prompts alone: with a first frame it is
`actor_rollout_ref.model.architecture=WanImageToVideoPipeline`.
"""

from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.utils import read_component_config, read_index
from verl_omni.pipelines.wan.adapter import Wan


@DiffusionModelBase.register("WanImageToVideoPipeline", algorithm="flow_grpo")
class WanImageToVideo(Wan):
    needs_images = True
    shares_tokens = False

    @classmethod
    def images_of_a_prompt(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        config = cls.transformer_config(model_config)
        if config.get("pos_embed_seq_len") is not None:  # Wan2.1-FLF2V: first and last
            return 2, 2
        first_alone = config.get("image_dim") is not None or read_index(model_config.path).get("expand_timesteps")
        return 1, 1 if first_alone else 2

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        inputs, given = super().model_inputs(module, model_config, sample, timestep, prompt), prompt["given_frames"]
        if inputs["timestep"].ndim == 2:
            frame = inputs["timestep"][:, : inputs["timestep"].shape[1] // sample.shape[2]]
            inputs["timestep"] = torch.cat([torch.zeros_like(frame), inputs["timestep"]], dim=1)
            inputs["hidden_states"] = torch.cat([given.to(sample.dtype), sample], dim=2)
            return inputs
        inputs["hidden_states"] = torch.cat([sample, given.to(sample.dtype)], dim=1)
        if "image_embeds" in prompt:  # those of each image are rows of their own
            inputs["encoder_hidden_states_image"] = prompt["image_embeds"].flatten(0, 1)
        return inputs

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        velocity = super().forward(module, model_inputs)
        return velocity[:, :, 1:] if model_inputs["timestep"].ndim == 2 else velocity

    @classmethod
    def encode_images(cls, pipe, images: list[Any] | None, model_config: DiffusionModelConfig) -> Conditions:
        least, most = cls.images_of_a_prompt(model_config)
        if not least <= len(images or ()) <= most:
            raise ValueError(
                f"this Wan makes a video of {least if least == most else f'{least} or {most}'} given frames, and a "
                f"prompt came with {len(images or ())}: give them in the data's column `images`"
            )
        size, device = model_config.pipeline, pipe.vae.device
        frames = [
            pipe.video_processor.preprocess(image, height=size.height, width=size.width).to(device) for image in images
        ]
        # Upstream's own, which makes noise as well unless it is given some.
        given = pipe.prepare_latents(
            frames[0],
            1,
            pipe.vae.config.z_dim,
            size.height,
            size.width,
            cls.num_frames(model_config),
            torch.float32,
            device,
            latents=torch.zeros(1),
            last_image=frames[1] if len(frames) > 1 else None,
        )[1]
        seen = {}
        if cls.transformer_config(model_config).get("image_dim") is not None:
            seen["image_embeds"] = pipe.encode_image(images, device)[None]
        return {"given_frames": given} | seen

    @classmethod
    def images_like(cls, model_config: DiffusionModelConfig) -> Conditions:
        size, vae = model_config.pipeline, read_component_config(model_config.path, "vae")
        frames = (cls.num_frames(model_config) - 1) // vae["scale_factor_temporal"] + 1
        rows, columns = (n // cls.vae_scale_factor(model_config) for n in (size.height, size.width))
        channels, config = vae["z_dim"], cls.transformer_config(model_config)
        if read_index(model_config.path).get("expand_timesteps"):
            frames = 1
        else:
            channels += vae["scale_factor_temporal"]
        seen = {}
        if (width := config.get("image_dim")) is not None:
            encoder = read_component_config(model_config.path, "image_encoder")
            patches = (encoder["image_size"] // encoder["patch_size"]) ** 2 + 1
            images = cls.images_of_a_prompt(model_config)[0]
            seen["image_embeds"] = torch.zeros(1, images, patches, width)
        return {"given_frames": torch.zeros(1, channels, frames, rows, columns)} | seen

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        from diffusers.utils.torch_utils import randn_tensor

        size, step = model_config.pipeline, cls.vae_scale_factor(model_config)
        frames = (cls.num_frames(model_config) - 1) // pipe.vae.config.scale_factor_temporal + 1
        shape = (len(generators), pipe.vae.config.z_dim, frames, size.height // step, size.width // step)
        latents = randn_tensor(shape, generators, generators[0].device, torch.float32)
        return latents[:, :, 1:] if pipe.config.expand_timesteps else latents

    @classmethod
    def whole_latents(cls, latents: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        given = conditions["given_frames"]
        alike = given.shape[1] == latents.shape[1]  # else they are channels beside the latents
        return torch.cat([given.to(latents.dtype), latents], dim=2) if alike else latents

    @classmethod
    def check(cls, model_config: DiffusionModelConfig) -> None:
        super().check(model_config)
        if cls.num_frames(model_config) == 1:
            raise ValueError(
                "actor_rollout_ref.rollout.pipeline.num_frames=1: the first frame is given, and there is nothing left "
                "to draw; try 5"
            )
