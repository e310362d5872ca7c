"""GLM-Image, text to image: an autoregressive model writes tokens of the image, a diffusion decoder draws them.

What is trained here is the decoder. It is told a token for each 32 x 32 pixels, and through ByT5 the words in quotes.
Those have no mask upstream, so that only prompts with equally many share a forward. The transformer is told a time that
is not σ: the schedule shifts σ and leaves the time as it is.
"""

from itertools import chain
from typing import Any

import numpy as np
import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.glm_image.image_tokens import FACTOR, asked, target, written_tokens
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.unshifted_time import UnshiftedTime
from verl_omni.pipelines.utils import check_length, encode_pixels, forward_by_length


@DiffusionModelBase.register("GlmImagePipeline", algorithm="flow_grpo")
class GlmImage(UnshiftedTime):
    default_guidance = 1.5
    size_multiple = 4
    fp8_modules = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
    shares_tokens = False
    libraries = ("glm_image",)  # diffusers writes it where it means transformers: both have a module of this name
    pipeline_defaults = {"negative_prompt": "", "max_sequence_length": 2048}

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return {"guidance_scale"}

    @classmethod
    def tokens(cls, model_config: DiffusionModelConfig) -> int:
        return 4 * super().tokens(model_config)

    @classmethod
    def times(cls, steps: int, most: int) -> np.ndarray:
        return np.linspace(most, 1.0, steps + 1)[:-1]

    # ---- the decoder ---------------------------------------------------------------------------------

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        size, (rows, columns) = model_config.pipeline, cls.grid(model_config)
        tokens = prompt["image_tokens"][:, : rows * columns].unflatten(1, (rows, columns))
        tokens = tokens.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)
        target_size = sample.new_tensor([[size.height, size.width]]).expand(len(sample), 2)
        return {
            "hidden_states": sample,
            "encoder_hidden_states": prompt["prompt_embeds"],
            "mask": prompt["prompt_embeds_mask"],
            "prior_token_id": tokens,
            "prior_token_drop": prompt["without_tokens"].expand_as(tokens),
            "timestep": timestep - 1,
            "target_size": target_size,
            "crop_coords": torch.zeros_like(target_size),
        }

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        return forward_by_length(module, model_inputs, "mask", super().forward)

    # ---- prompts -------------------------------------------------------------------------------------

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        """Ids of the whole prompt for the autoregressive model, and ByT5's of the words in quotes, each with how many
        they are before them."""
        ids = asked(tokenizers["processor"], prompt)
        check_length(prompt, len(ids), max_sequence_length)
        return [len(ids), *ids, *cls._words(tokenizers, prompt, max_sequence_length)]

    @classmethod
    def tokenize_negative(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        """Nothing for the autoregressive model: away from a negative prompt means without its tokens."""
        if prompt.strip():
            raise ValueError(f'negative_prompt="{prompt[:80]}": GLM-Image reads none; leave it out')
        return [0, *cls._words(tokenizers, "", max_sequence_length)]

    @classmethod
    def _words(cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int) -> list[int]:
        from diffusers import GlmImagePipeline

        (texts,) = GlmImagePipeline.get_glyph_texts(None, prompt)
        ids = tokenizers["tokenizer"](texts or [""]).input_ids
        check_length(prompt, max(map(len, ids)), max_sequence_length)
        # Upstream puts a padding token before each where they are an even number, and counts it as a word.
        before = [tokenizers["tokenizer"].pad_token_id] * ((len(ids) + 1) % 2)
        return list(chain.from_iterable((len(before) + len(one), *before, *one) for one in ids))

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        whole, *words = parts(prompt_ids)
        device, longest = pipe.text_encoder.device, max(map(len, words))
        ids = torch.full((len(words), longest), pipe.tokenizer.pad_token_id, device=device)
        mask = torch.zeros_like(ids)
        for i, one in enumerate(words):
            ids[i, : len(one)], mask[i, : len(one)] = torch.tensor(one), 1
        embeds = pipe.text_encoder(ids, attention_mask=mask).last_hidden_state[mask.bool()][None]
        return {
            "prompt_embeds": embeds,
            "prompt_embeds_mask": torch.ones(embeds.shape[:2], dtype=torch.bool, device=device),
            "without_tokens": torch.tensor([[not whole]], device=device),
        }

    @classmethod
    def drawn_conditions(
        cls,
        pipe,
        prompts: list[list[int]],
        model_config: DiffusionModelConfig,
        seeds: list[int],
        written: list[list[int] | None],
    ) -> list[Conditions]:
        size, codes = model_config.pipeline, cls.transformer_config(model_config)["prior_vq_quantizer_codebook_size"]
        tail, grids = target(pipe.processor, size.height, size.width)
        left = [i for i, tokens in enumerate(written) if tokens is None]
        rows = [None if tokens is None else torch.tensor([tokens], device=pipe.vae.device) for tokens in written]
        if left:
            ids, own = [parts(prompts[i])[0] + tail for i in left], [seeds[i] for i in left]
            tokens = written_tokens(pipe.vision_language_encoder, ids, grids, codes, own)
            for i, row in zip(left, tokens, strict=True):
                rows[i] = row[None]
        return [{"image_tokens": row} for row in rows]

    @classmethod
    def conditions_like(cls, model_config: DiffusionModelConfig, tokens: int) -> Conditions:
        """Without words in quotes."""
        config, rows = cls.transformer_config(model_config), int(np.prod(cls.grid(model_config)))
        return {
            "prompt_embeds": torch.zeros(1, 1, config["text_embed_dim"]),
            "prompt_embeds_mask": torch.ones(1, 1).bool(),
            "without_tokens": torch.zeros(1, 1).bool(),
            "image_tokens": torch.zeros(1, rows, dtype=torch.long),
        }

    # ---- pixels --------------------------------------------------------------------------------------

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        size, device = model_config.pipeline, generators[0].device
        return pipe.prepare_latents(
            len(generators), module.config.in_channels, size.height, size.width, torch.float32, device, generators
        )

    @classmethod
    def decode_latents(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        mean, std = cls._latent_statistics(pipe.vae, latents)
        image = pipe.vae.decode((latents * std + mean).to(pipe.vae.dtype), return_dict=False)[0]
        return pipe.image_processor.postprocess(image, output_type="pt")

    @classmethod
    def encode_image(cls, pipe, images: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        latents = encode_pixels(pipe, images)
        mean, std = cls._latent_statistics(pipe.vae, latents)
        return (latents - mean) / std

    @staticmethod
    def _latent_statistics(vae, latents: torch.Tensor) -> list[torch.Tensor]:
        values = (vae.config.latents_mean, vae.config.latents_std)
        return [torch.tensor(v).to(latents).view(1, -1, 1, 1) for v in values]

    @classmethod
    def check(cls, model_config: DiffusionModelConfig) -> None:
        negative = (model_config.pipeline.negative_prompt or "").strip()
        if negative:
            raise ValueError(
                f'actor_rollout_ref.rollout.pipeline.negative_prompt="{negative[:80]}": GLM-Image reads none; leave it '
                "out"
            )
        if FACTOR != cls.size_multiple * cls.vae_scale_factor(model_config):
            raise ValueError(
                f"the VAE of {model_config.path} makes a latent of {cls.vae_scale_factor(model_config)} pixels: "
                f"GLM-Image's tokens are for one of {FACTOR // cls.size_multiple}"
            )


def parts(ids: list[int]) -> list[list[int]]:
    """What `tokenize` put one after another."""
    found, at = [], 0
    while at < len(ids):
        found.append(ids[at + 1 : at + 1 + ids[at]])
        at += 1 + ids[at]
    return found
