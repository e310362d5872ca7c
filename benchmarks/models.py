"""Folders of configurations and tokenizers only; `load_format=dummy` gives them random weights on the device."""

import contextlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_omni.testing.tiny_random import build_tiny_random

SD35_MEDIUM = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 24,
    "attention_head_dim": 64, "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048, "pos_embed_max_size": 384, "dual_attention_layers": list(range(13)),
    "qk_norm": "rms_norm",
}  # fmt: skip
SD35_LARGE = SD35_MEDIUM | {
    "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
    "dual_attention_layers": [],
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
FLUX_DEV = {
    "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True, "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
FLUX_VAE = SD3_VAE | {"scaling_factor": 0.3611, "shift_factor": 0.1159}
FLUX2_KLEIN_4B = {
    "in_channels": 128, "num_layers": 5, "num_single_layers": 20, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 7680, "timestep_guidance_channels": 256, "axes_dims_rope": [32, 32, 32, 32],
}  # fmt: skip
FLUX2_DEV = FLUX2_KLEIN_4B | {
    "num_layers": 8, "num_single_layers": 48, "num_attention_heads": 48, "joint_attention_dim": 15360,
    "guidance_embeds": True,
}  # fmt: skip
FLUX2_VAE = {
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 32, "norm_num_groups": 32,
}  # fmt: skip
Z_IMAGE = {
    "in_channels": 16, "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30,
    "cap_feat_dim": 2560, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512],
}  # fmt: skip
WAN_1_3B = {
    "num_attention_heads": 12, "attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": 4096,
    "freq_dim": 256, "ffn_dim": 8960, "num_layers": 30, "rope_max_seq_len": 1024,
}  # fmt: skip

WAN_TI2V_5B = WAN_1_3B | {
    "num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336,
}  # fmt: skip
WAN_2_2_VAE = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
    "temperal_downsample": [False, True, True], "is_residual": True, "in_channels": 12, "out_channels": 12,
    "patch_size": 2, "scale_factor_spatial": 16, "scale_factor_temporal": 4, "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}  # fmt: skip
# What is not here is the default of diffusers' class: the published model's.
LTX2_VAE = {
    "latent_channels": 128, "block_out_channels": [256, 512, 1024, 2048],
    "down_block_types": ["LTX2VideoDownBlock3D"] * 4, "decoder_block_out_channels": [256, 512, 1024],
    "layers_per_block": [4, 6, 6, 2, 2], "decoder_layers_per_block": [5, 5, 5, 5],
    "spatio_temporal_scaling": [True] * 4, "decoder_spatio_temporal_scaling": [True] * 3,
    "decoder_inject_noise": [False] * 4, "downsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
    "upsample_type": ["spatiotemporal"] * 3, "upsample_residual": [True] * 3, "upsample_factor": [2, 2, 2],
    "patch_size": 4, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8,
    "decoder_spatial_padding_mode": "reflect",
}  # fmt: skip
WAN_A14B = WAN_1_3B | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}


# What is left of a transformer in few layers: of each kind one or two.
FEW_LAYERS = {
    "num_layers": 2, "num_single_layers": 1, "n_layers": 2, "n_refiner_layers": 1, "dual_attention_layers": [0],
}  # fmt: skip
_miniature = _few_layers = False


@contextlib.contextmanager
def in_miniature() -> Iterator[None]:
    """Folders made inside have tiny models of the same kinds, which a CPU can run."""
    global _miniature
    _miniature = True
    try:
        yield
    finally:
        _miniature = False


@contextlib.contextmanager
def in_few_layers() -> Iterator[None]:
    """Folders made inside have models of the real widths, which a CPU can run, slowly: whether all fits together."""
    global _few_layers
    _few_layers = True
    try:
        yield
    finally:
        _few_layers = False


def sd35_medium(out: Path, t5: bool = False, transformer: dict[str, Any] = SD35_MEDIUM) -> Path:
    """Real transformer and VAE. CLIP has its real widths but few layers, T5 is left out: prompts are encoded once.

    `t5`: it is there with its real width and two layers.
    """
    folder = build_tiny_random("StableDiffusion3Pipeline", out)
    _update(folder / "transformer/config.json", transformer)
    _update(folder / "vae/config.json", SD3_VAE)
    for name, width in (("text_encoder", 768), ("text_encoder_2", 1280)):
        _update(
            folder / name / "config.json", {"hidden_size": width, "projection_dim": width, "num_attention_heads": 8}
        )
    if t5:
        _update(folder / "text_encoder_3/config.json", {"d_model": 4096})
    else:
        _update(folder / "model_index.json", {"text_encoder_3": [None, None], "tokenizer_3": [None, None]})
    return folder


def sd35_medium_with_t5(out: Path) -> Path:
    return sd35_medium(out, t5=True)


def sd35_large(out: Path) -> Path:
    return sd35_medium(out, transformer=SD35_LARGE)


def qwen_image_edit(out: Path) -> Path:
    return qwen_image(out, "QwenImageEditPlusPipeline")


def qwen_image(out: Path, pipeline: str = "QwenImagePipeline") -> Path:
    """Real transformer (20B) and VAE; the text encoder has its real width and two layers."""
    folder = build_tiny_random(pipeline, out)
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
    _update(path, config)
    return folder


def flux_kontext(out: Path) -> Path:
    return flux_dev(out, "FluxKontextPipeline")


def flux_dev(out: Path, pipeline: str = "FluxPipeline") -> Path:
    """Real transformer (12B) and VAE; the text encoders have their real widths and few layers."""
    folder = build_tiny_random(pipeline, out)
    _update(folder / "transformer/config.json", FLUX_DEV)
    _update(folder / "vae/config.json", FLUX_VAE)
    _update(folder / "text_encoder/config.json", {"hidden_size": 768, "num_attention_heads": 8})
    _update(folder / "text_encoder_2/config.json", {"d_model": 4096})
    return folder


def flux2_klein(out: Path) -> Path:
    """Real transformer (4B) and VAE; the text encoder has its real width."""
    folder = build_tiny_random("Flux2KleinPipeline", out)
    _update(folder / "transformer/config.json", FLUX2_KLEIN_4B)
    _update(folder / "vae/config.json", FLUX2_VAE)
    _update(folder / "text_encoder/config.json", {"hidden_size": 2560})
    return folder


def flux2_dev(out: Path) -> Path:
    """Real transformer (32B) and VAE; the text encoder has its real width."""
    folder = build_tiny_random("Flux2Pipeline", out)
    _update(folder / "transformer/config.json", FLUX2_DEV)
    _update(folder / "vae/config.json", FLUX2_VAE)
    config = folder / "text_encoder/config.json"
    _update(config, {"text_config": json.loads(config.read_text())["text_config"] | {"hidden_size": 5120}})
    return folder


def z_image(out: Path) -> Path:
    """Real transformer (6B) and VAE; the text encoder has its real width and three layers."""
    folder = build_tiny_random("ZImagePipeline", out)
    _update(folder / "transformer/config.json", Z_IMAGE)
    _update(folder / "vae/config.json", FLUX_VAE)
    _update(folder / "text_encoder/config.json", {"hidden_size": 2560})
    return folder


def wan_1_3b(out: Path) -> Path:
    """Real transformer (1.4B) and VAE; the text encoder has its real width and few layers."""
    folder = build_tiny_random("WanPipeline", out)
    _update(folder / "transformer/config.json", WAN_1_3B)
    _update(folder / "vae/config.json", QWEN_VAE)
    _update(folder / "text_encoder/config.json", {"d_model": 4096})
    return folder


def wan_ti2v_5b(out: Path) -> Path:
    """Real transformer (5B, a timestep for each token) and VAE; the text encoder has its real width and few layers."""
    folder = build_tiny_random("WanPipeline", out)
    _update(folder / "model_index.json", {"expand_timesteps": True})
    _update(folder / "transformer/config.json", WAN_TI2V_5B)
    _update(folder / "vae/config.json", WAN_2_2_VAE)
    _update(folder / "text_encoder/config.json", {"d_model": 4096})
    return folder


def wan_2_2(out: Path) -> Path:
    """Both real transformers (14B each) and the VAE; the text encoder has its real width and few layers."""
    folder = build_tiny_random("WanPipeline-2.2", out)
    for name in ("transformer", "transformer_2"):
        _update(folder / name / "config.json", WAN_A14B)
    _update(folder / "vae/config.json", QWEN_VAE)
    _update(folder / "text_encoder/config.json", {"d_model": 4096})
    return folder


def defaults_of(cls: type) -> dict[str, Any]:
    """Of diffusers' class: the published model's."""
    parameters = inspect.signature(cls.__init__).parameters
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def ltx2(out: Path) -> Path:
    """Real transformer (19B), VAEs, connectors and vocoder; the text encoder has its real width and two layers."""
    import diffusers
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    folder = build_tiny_random("LTX2Pipeline", out)
    for name, cls in (
        ("transformer", diffusers.LTX2VideoTransformer3DModel),
        ("audio_vae", diffusers.AutoencoderKLLTX2Audio),
        ("connectors", LTX2TextConnectors),
        ("vocoder", LTX2Vocoder),
    ):
        _update(folder / name / "config.json", defaults_of(cls))
    _update(folder / "connectors/config.json", {"text_proj_in_factor": 3})
    _update(folder / "vae/config.json", LTX2_VAE)
    path = folder / "text_encoder/config.json"
    config = json.loads(path.read_text())
    config["text_config"].update({"hidden_size": 3840, "num_attention_heads": 16, "head_dim": 256})
    _update(path, config)
    return folder


def longcat_audio(out: Path) -> Path:
    """Transformer and VAE of diffusers' defaults; the text encoder has its real width and few layers."""
    import diffusers

    folder = build_tiny_random("LongCatAudioDiTPipeline", out)
    _update(folder / "transformer/config.json", defaults_of(diffusers.LongCatAudioDiTTransformer))
    _update(folder / "vae/config.json", defaults_of(diffusers.LongCatAudioDiTVae))
    _update(folder / "text_encoder/config.json", {"d_model": 768})
    return folder


def glm_image(out: Path) -> Path:
    """A decoder as large as the real one (7B) and its VAE; what writes tokens before it has one layer."""
    import diffusers

    folder = build_tiny_random("GlmImagePipeline", out)
    wide = {"attention_head_dim": 128, "num_attention_heads": 32}
    _update(folder / "transformer/config.json", defaults_of(diffusers.GlmImageTransformer2DModel) | wide)
    statistics = {"latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}
    _update(folder / "vae/config.json", FLUX_VAE | statistics)
    _update(folder / "text_encoder/config.json", {"d_model": 1472})
    return folder


def tiny_sd3(out: Path) -> Path:
    return build_tiny_random("StableDiffusion3Pipeline", out)


def tiny_ltx2(out: Path) -> Path:
    return build_tiny_random("LTX2Pipeline", out)


def tiny_qwen_image(out: Path) -> Path:
    return build_tiny_random("QwenImagePipeline", out)


def write_weights(folder: Path, device: str) -> None:
    """Random weights in bfloat16 for every component of a folder, as its configurations say, in place of its own."""
    import diffusers
    import torch
    import transformers

    libraries = {"diffusers": diffusers, "transformers": transformers}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for name, (library, kind) in _components(folder):
            old = list((folder / name).glob("*.safetensors"))
            if not old:  # a tokenizer or a scheduler
                continue
            for file in old:
                file.unlink()
            cls = getattr(libraries[library], kind)
            torch.manual_seed(0)
            with torch.device(device):
                if library == "diffusers":
                    model = cls.from_config(cls.load_config(folder / name))
                else:
                    model = cls(cls.config_class.from_pretrained(folder / name))
            model.to(torch.bfloat16).save_pretrained(folder / name)
            del model
    finally:
        torch.set_default_dtype(before)


def _components(folder: Path) -> list[tuple[str, list[str]]]:
    index = json.loads((folder / "model_index.json").read_text())
    return [(k, v) for k, v in index.items() if isinstance(v, list) and v[0] in ("diffusers", "transformers")]


def _update(path: Path, values: dict[str, Any]) -> None:
    """What a pipeline consists of is the same in miniature, and the size of its parts is not."""
    if _miniature and path.name == "config.json":
        return
    config = json.loads(path.read_text()) | values
    if _few_layers and path.parent.name.startswith("transformer"):
        config |= {name: few for name, few in FEW_LAYERS.items() if config.get(name)}
    path.write_text(json.dumps(config, indent=1))
