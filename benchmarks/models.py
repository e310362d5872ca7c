"""Folders of configurations and tokenizers only; `load_format=dummy` gives them random weights on the device."""

import json
from pathlib import Path
from typing import Any

from verl_omni.utils.tiny_random import build_tiny_random

SD35_MEDIUM = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 24,
    "attention_head_dim": 64, "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048, "pos_embed_max_size": 384, "dual_attention_layers": list(range(13)),
    "qk_norm": "rms_norm",
}  # fmt: skip
SD3_VAE = {
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 16, "norm_num_groups": 32,
    "sample_size": 1024, "scaling_factor": 1.5305, "shift_factor": 0.0609,
}  # fmt: skip
QWEN_IMAGE = {
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 3584, "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
QWEN_VAE = {
    "base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
    "temperal_downsample": [False, True, True], "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16,
}  # fmt: skip


def sd35_medium(out: Path) -> Path:
    """Real transformer and VAE. CLIP has its real widths but few layers, T5 is left out: prompts are encoded once."""
    folder = build_tiny_random("StableDiffusion3Pipeline", out)
    _update(folder / "transformer/config.json", SD35_MEDIUM)
    _update(folder / "vae/config.json", SD3_VAE)
    for name, width in (("text_encoder", 768), ("text_encoder_2", 1280)):
        _update(
            folder / name / "config.json", {"hidden_size": width, "projection_dim": width, "num_attention_heads": 8}
        )
    _update(folder / "model_index.json", {"text_encoder_3": [None, None], "tokenizer_3": [None, None]})
    return folder


def qwen_image(out: Path) -> Path:
    """Real transformer (20B) and VAE; the text encoder has its real width and two layers."""
    folder = build_tiny_random("QwenImagePipeline", out)
    _update(folder / "transformer/config.json", QWEN_IMAGE)
    _update(folder / "vae/config.json", QWEN_VAE)
    path = folder / "text_encoder/config.json"
    config = json.loads(path.read_text())
    wide = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128}
    text = config.get("text_config", config)
    text.update(wide)
    for rope in ("rope_scaling", "rope_parameters"):
        if text.get(rope):
            text[rope]["mrope_section"] = [16, 24, 24]
    config["vision_config"]["out_hidden_size"] = 3584
    path.write_text(json.dumps(config))
    return folder


def tiny_sd3(out: Path) -> Path:
    return build_tiny_random("StableDiffusion3Pipeline", out)


def tiny_qwen_image(out: Path) -> Path:
    return build_tiny_random("QwenImagePipeline", out)


def _update(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=1))
