"""Tiny-random checkpoints for tests: built once per process, in a temporary folder that goes away with it."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model_state_dict

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.utils import diffusers_since
from verl_omni.testing.tiny_random import build_tiny_random

# Of models that not every diffusers has that we allow, the first that does.
SINCE = {"MiniMaxH3ModularPipeline": "0.40"}


def is_known(pipeline_class: str) -> bool:
    return diffusers_since(SINCE.get(pipeline_class, "0"))


def skip_unless_known(pipeline_class: str) -> None:
    if not is_known(pipeline_class):
        pytest.skip(f"{pipeline_class} is in diffusers from {SINCE[pipeline_class]} on")


@functools.cache
def tiny_checkpoint(pipeline_class: str = "QwenImagePipeline", seed: int = 0) -> Path:
    """The folder of a tiny-random checkpoint. Shared by all tests of this process: read it, do not write to it.

    A test of a model that this diffusers does not have is skipped.
    """
    skip_unless_known(pipeline_class)
    root = tempfile.mkdtemp(prefix=f"tiny-{pipeline_class}-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return build_tiny_random(pipeline_class, root, seed)


def tiny_adapter(folder: Path, rank: int, pipeline_class: str = "QwenImagePipeline") -> Path:
    """A LoRA of the tiny checkpoint in diffusers' format, with the architecture's own target modules."""
    from verl_omni.pipelines.model_base import DiffusionModelBase

    model = DiffusionModelConfig(path=str(tiny_checkpoint(pipeline_class)))
    adapter = DiffusionModelBase.get_class(model)
    module = adapter.load_module(model, torch.float32)
    module.add_adapter(LoraConfig(r=rank, target_modules=list(adapter.lora_target_modules)))
    state = get_peft_model_state_dict(module)
    pipeline = getattr(diffusers, pipeline_class)
    pipeline.save_lora_weights(folder, transformer_lora_layers=state)
    return folder


def tiny_sd3_transformer(adapted: tuple[str, ...] = ("attn.to_q",), **config) -> SD3Transformer2DModel:
    """Frozen, with LoRA on some of its layers."""
    module = SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8, **config,
    )  # fmt: skip
    module.requires_grad_(False)
    module.add_adapter(LoraConfig(r=2, target_modules=list(adapted), init_lora_weights=False))
    return module
