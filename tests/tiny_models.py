"""Tiny-random checkpoints for tests: built once per process, in a temporary folder that goes away with it."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from diffusers import SD3Transformer2DModel
from peft import LoraConfig

from verl_omni.testing.tiny_random import build_tiny_random


@functools.cache
def tiny_checkpoint(pipeline_class: str = "QwenImagePipeline", seed: int = 0) -> Path:
    """The folder of a tiny-random checkpoint. Shared by all tests of this process: read it, do not write to it."""
    root = tempfile.mkdtemp(prefix=f"tiny-{pipeline_class}-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return build_tiny_random(pipeline_class, root, seed)


def tiny_sd3_transformer(adapted: tuple[str, ...] = ("attn.to_q",), **config) -> SD3Transformer2DModel:
    """Frozen, with LoRA on some of its layers."""
    module = SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8, **config,
    )  # fmt: skip
    module.requires_grad_(False)
    module.add_adapter(LoraConfig(r=2, target_modules=list(adapted), init_lora_weights=False))
    return module
