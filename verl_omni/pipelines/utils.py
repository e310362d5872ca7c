"""Small helpers that several model adapters share."""

import functools
import json
import os
from typing import Any

import torch

from verl_omni.utils.suggest import unknown


def pipeline_class(architecture: str) -> type:
    """The diffusers pipeline of that name."""
    import diffusers

    if not hasattr(diffusers, architecture):
        names = [n for n in dir(diffusers) if n.endswith("Pipeline")]
        raise ValueError(unknown("diffusers pipeline", architecture, names))
    return getattr(diffusers, architecture)


@functools.lru_cache(maxsize=64)
def read_component_config(path: str, component: str) -> dict[str, Any]:
    """config.json of one component of a diffusers folder."""
    with open(os.path.join(os.path.expanduser(path), component, "config.json")) as f:
        return json.load(f)


@functools.lru_cache(maxsize=64)
def read_index(path: str) -> dict[str, Any]:
    """model_index.json of a diffusers folder."""
    with open(os.path.join(os.path.expanduser(path), "model_index.json")) as f:
        return json.load(f)


def load_component(model_config: Any, name: str, dtype: torch.dtype) -> torch.nn.Module:
    """One model of a diffusers folder, by the class that its config names."""
    import diffusers

    config = read_component_config(model_config.config_path or model_config.path, name)
    cls = getattr(diffusers, config["_class_name"])
    return cls.from_pretrained(os.path.expanduser(model_config.path), subfolder=name, torch_dtype=dtype)


def load_tokenizers(path: str) -> dict[str, Any]:
    """All tokenizers and processors that model_index.json names, without loading a model."""
    import transformers

    path = os.path.expanduser(path)
    index = read_index(path)
    names = [k for k in index if k.startswith(("tokenizer", "processor")) and index[k][0] is not None]
    return {n: getattr(transformers, index[n][1]).from_pretrained(os.path.join(path, n)) for n in names}


def check_length(prompt: str, tokens: int, max_sequence_length: int) -> None:
    if tokens > max_sequence_length:
        raise ValueError(
            f"a prompt has {tokens} tokens, more than max_sequence_length={max_sequence_length}: shorten it or raise "
            f'actor_rollout_ref.rollout.pipeline.max_sequence_length. The prompt: "{prompt[:80]}..."'
        )


def clip_ids(tokenizer: Any, prompt: str) -> list[int]:
    """CLIP's fixed length, cut off where the prompt is longer, as upstream does: another encoder reads the rest."""
    return tokenizer(prompt, padding="max_length", max_length=tokenizer.model_max_length, truncation=True).input_ids


def t5_ids(tokenizer: Any, prompt: str, max_sequence_length: int) -> list[int]:
    """T5's ids padded to `max_sequence_length`: the models that read them were trained without a mask."""
    ids = tokenizer(prompt).input_ids
    check_length(prompt, len(ids), max_sequence_length)
    return ids + [tokenizer.pad_token_id] * (max_sequence_length - len(ids))


def dense_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """None where a mask masks nothing, as diffusers does it: attention then takes its fast path."""
    return None if mask is None or bool(mask.all()) else mask


def trim_padding(embeds: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the columns that are padding in every row."""
    longest = int(mask.sum(dim=1).max())
    return embeds[:, :longest], mask[:, :longest]


def flow_shift(image_seq_len: int, config: Any) -> float:
    """diffusers' `mu`: the shift of the noise schedule grows linearly with the number of latent tokens."""
    x0, x1 = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    y0, y1 = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (y1 - y0) / (x1 - x0)
    return image_seq_len * slope + y0 - slope * x0


def encode_image(pipe: Any, images: torch.Tensor) -> torch.Tensor:
    """Images in [0, 1] to latents (B, C, h, w), for diffusers' AutoencoderKL: the mean of what the encoder predicts."""
    config = pipe.vae.config
    latents = pipe.vae.encode((2 * images - 1).to(pipe.vae)).latent_dist.mode()
    return (latents.float() - config.shift_factor) * config.scaling_factor


def decode_image(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, h, w) to images in [0, 1], for diffusers' AutoencoderKL."""
    config = pipe.vae.config
    latents = (latents / config.scaling_factor + config.shift_factor).to(pipe.vae.dtype)
    return pipe.image_processor.postprocess(pipe.vae.decode(latents, return_dict=False)[0], output_type="pt")
