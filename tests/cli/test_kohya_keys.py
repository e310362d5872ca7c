"""Kohya's keys of a LoRA: diffusers' own converters for files of other programs give what was exported."""

import pytest
import torch
from diffusers.loaders import lora_conversion_utils as converters
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import tiny_checkpoint

from verl_omni.cli.export import rows_of
from verl_omni.cli.kohya_keys import KNOWN, as_kohya
from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase

RANK, ALPHA = 2, 6.0
FLUX = [
    *(f"transformer_blocks.1.attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out")),
    *(f"transformer_blocks.1.attn.add_{name}_proj" for name in "qkv"),
    *(f"transformer_blocks.0.{name}" for name in ("ff.net.0.proj", "ff.net.2", "norm1.linear", "norm1_context.linear")),
    *(f"transformer_blocks.0.ff_context.{name}" for name in ("net.0.proj", "net.2")),
    *(f"single_transformer_blocks.3.attn.{name}" for name in ("to_q", "to_k", "to_v")),
    *(f"single_transformer_blocks.3.{name}" for name in ("proj_mlp", "proj_out", "norm.linear")),
]
WAN = [
    f"blocks.{number}.{layer}"
    for number in (0, 1)
    for layer in (
        *(f"attn{a}.{name}" for a in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *("ffn.net.0.proj", "ffn.net.2"),
    )
]
Z_IMAGE = [
    f"layers.0.{name}" for name in ("attention.to_q", "attention.to_out.0", "feed_forward.w1", "feed_forward.w2")
]
CHROMA = [layer for layer in FLUX if "norm" not in layer]
FIRST_FRAME = [*WAN, *(f"blocks.{number}.attn2.add_{name}_proj" for number in (0, 1) for name in "kv")]
SD3 = [
    *(f"transformer_blocks.{number}.attn.to_{name}" for number in (0, 1) for name in ("q", "k", "v", "out.0")),
    *(f"transformer_blocks.{number}.attn.add_{name}_proj" for number in (0, 1) for name in "qkv"),
    *(f"transformer_blocks.0.attn2.to_{name}" for name in ("q", "k", "v", "out.0")),
    *(f"transformer_blocks.0.{name}" for name in ("attn.to_add_out", "ff.net.0.proj", "ff.net.2", "norm1.linear")),
    *(f"transformer_blocks.0.ff_context.{name}" for name in ("net.0.proj", "net.2")),
]


class Checkpoint(dict):
    """Of SD3 as its authors have it: what a LoRA changes; nothing else is looked at."""

    def pop(self, name: str, *_) -> torch.Tensor:
        return super().pop(name, torch.zeros(6, 1))


def read_sd3(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """ComfyUI takes the name of each of its layers with _ for a dot; diffusers says what is under that name."""
    blocks = [f"joint_blocks.{number}.{block}_block" for number in (0, 1) for block in ("x", "context")]
    parts = ["attn.qkv", "attn.proj", "attn2.qkv", "attn2.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1"]
    whole = Checkpoint({"context_embedder.weight": torch.zeros(6, 1)})
    for layer in (f"{block}.{part}" for block in blocks for part in parts):
        name = f"lora_unet_{layer.replace('.', '_')}"
        if f"{name}.alpha" in theirs:
            down, up = (theirs.pop(f"{name}.lora_{side}.weight") for side in ("down", "up"))
            whole[f"{layer}.weight"] = up @ down * theirs.pop(f"{name}.alpha") / len(down)
    assert not theirs
    found = convert_sd3_transformer_checkpoint_to_diffusers(whole)
    changed = {key.removesuffix(".weight"): change for key, change in found.items() if change.any()}
    return {
        f"{layer}.{side}.weight": pair
        for layer, change in changed.items()
        for side, pair in (("lora_A", torch.eye(change.shape[1])), ("lora_B", change))
    }


CASES = {
    "FluxPipeline": (FLUX, converters._convert_kohya_flux_lora_to_diffusers),
    "FluxKontextPipeline": (FLUX, converters._convert_kohya_flux_lora_to_diffusers),
    "ChromaPipeline": (CHROMA, converters._convert_kohya_flux_lora_to_diffusers),
    "WanPipeline": (WAN, converters._convert_musubi_wan_lora_to_diffusers),
    "WanImageToVideoPipeline": (FIRST_FRAME, converters._convert_musubi_wan_lora_to_diffusers),
    "StableDiffusion3Pipeline": (SD3, read_sd3),
    "ZImagePipeline": (Z_IMAGE, converters._convert_non_diffusers_z_image_lora_to_diffusers),
}


def outputs(layer: str) -> int:
    """Those of Flux, which its converter has by heart."""
    return 12288 if layer.endswith("proj_mlp") else 3072


def lora(layers: list[str]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    state = {}
    for layer in layers:
        state[f"transformer.{layer}.lora_A.weight"] = torch.randn(RANK, 8, generator=random)
        state[f"transformer.{layer}.lora_B.weight"] = torch.randn(outputs(layer), RANK, generator=random)
    return state


def changes(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a LoRA adds to each layer."""
    ends = ".lora_A.weight"
    layers = [key.removesuffix(ends) for key in state if key.endswith(ends)]
    added = {layer: state[f"{layer}.lora_B.weight"] @ state[f"{layer}{ends}"] for layer in layers}
    return {layer.removeprefix("transformer."): change for layer, change in added.items()}


@pytest.mark.parametrize("architecture", CASES)
def test_diffusers_reads_them_back(architecture):
    layers, convert = CASES[architecture]
    state = lora(layers)
    theirs = as_kohya(architecture, state, ALPHA, outputs)
    assert all(key.startswith("lora_unet_") for key in theirs)
    read, ours = changes(convert(dict(theirs))), changes(state)
    assert read.keys() == ours.keys()
    for layer, change in ours.items():
        torch.testing.assert_close(read[layer], change * ALPHA / RANK)


@pytest.mark.parametrize("architecture", KNOWN)
def test_all_that_a_lora_is_on_has_a_name(architecture):
    """As the tiny model's files and its adapter have it."""
    folder = tiny_checkpoint(architecture)
    model = DiffusionModelConfig(path=str(folder))
    targets = tuple(f".{name}.weight" for name in DiffusionModelBase.get_class(model).lora_target_modules)
    state = {}
    for file in (folder / "transformer").glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for key in (key for key in tensors.keys() if key.endswith(targets)):  # noqa: SIM118
                layer, (rows, width) = key.removesuffix(".weight"), tensors.get_slice(key).get_shape()
                state |= {f"{layer}.lora_A.weight": torch.ones(1, width), f"{layer}.lora_B.weight": torch.ones(rows, 1)}
    theirs = as_kohya(architecture, state, None, lambda layer: rows_of(folder / "transformer", layer))
    trained = sum(len(up) for name, up in theirs.items() if name.endswith("lora_up.weight"))
    ours = sum(len(up) for name, up in state.items() if name.endswith("lora_B.weight"))
    assert 0 < ours <= trained


def test_a_part_of_a_layer_that_was_not_trained_changes_nothing():
    layers = [layer for layer in FLUX if not layer.endswith(("proj_mlp", "to_k"))]
    read = changes(
        converters._convert_kohya_flux_lora_to_diffusers(as_kohya("FluxPipeline", lora(layers), None, outputs))
    )
    ours = changes(lora(layers))
    for layer, change in read.items():
        torch.testing.assert_close(change, ours.get(layer, torch.zeros_like(change)))
    assert not read["single_transformer_blocks.3.proj_mlp"].any() and "transformer_blocks.1.attn.to_k" in read


def test_a_layer_without_a_name_there():
    with pytest.raises(ValueError, match="FluxPipeline has no name for the layer transformer_blocks.0.attn.norm_q"):
        as_kohya("FluxPipeline", lora(["transformer_blocks.0.attn.norm_q"]), None, outputs)


def test_outputs_of_a_layer_from_the_head_of_a_file(tmp_path):
    save_file({"a.weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    assert rows_of(tmp_path, "a") == 3
    with pytest.raises(ValueError, match="has no layer b"):
        rows_of(tmp_path, "b")
    folder = tiny_checkpoint() / "transformer"
    assert rows_of(folder, "transformer_blocks.0.attn.to_q") > 0
