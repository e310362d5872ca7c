"""A model folder with something wrong: one line that names the file, before any worker starts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_checkpoint

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import _BUILTIN
from verl_omni.pipelines.model_folder import check_model_folder
from verl_omni.pipelines.utils import load_component, read_component_config, read_index
from verl_omni.trainer.failures import users_mistake

QWEN = "QwenImagePipeline"


def edit(path: Path, **changes) -> None:
    """Change keys of a JSON file; None takes one away."""
    held = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in held.items() if v is not None}))


def write(path: Path, text: str) -> None:
    path.write_text(text)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


INDEX, CONFIG = "model_index.json", "transformer/config.json"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
CASES = {
    "no JSON": (lambda f: write(f / INDEX, "{oops"), f"{INDEX} is no JSON: "),
    "no object": (lambda f: write(f / INDEX, "[1]"), f"{INDEX} holds a list: expected a JSON object"),
    "not UTF-8": (lambda f: (f / INDEX).write_bytes(b"\xff\xfe"), f"{INDEX} is no JSON, which is text in UTF-8: "),
    "other layout": (lambda f: write(f / INDEX, '{"model_type": "qwen2"}'), f"{INDEX} names no pipeline"),
    "component without a pair": (lambda f: edit(f / INDEX, vae="AutoencoderKL"), f'{INDEX} has "vae": "AutoencoderKL"'),
    "component of three": (lambda f: edit(f / INDEX, vae=[1, 2]), f'{INDEX} has "vae": [1, 2]: expected ["library"'),
    "component without a class": (lambda f: edit(f / INDEX, vae=[None, None]), f'{INDEX} names no class for "vae"'),
    "component not there": (lambda f: edit(f / INDEX, text_encoder=None), f'{INDEX} has no component "text_encoder"'),
    "class that is none": (
        lambda f: edit(f / INDEX, vae=["diffusers", "AutoencoderKLQwenImages"]),
        'Did you mean "AutoencoderKLQwenImage"',
    ),
    "class of another model": (
        lambda f: edit(f / INDEX, transformer=["diffusers", "FluxTransformer2DModel"]),
        f'{INDEX} has "transformer" of the class FluxTransformer2DModel: a {QWEN} has a QwenImageTransformer2DModel',
    ),
    "config of another model": (
        lambda f: edit(f / CONFIG, _class_name="FluxTransformer2DModel"),
        f"{CONFIG} is of a FluxTransformer2DModel: expected QwenImageTransformer2DModel",
    ),
    "config without a class": (lambda f: edit(f / CONFIG, _class_name=None), f"{CONFIG} has no _class_name"),
    "config that is no JSON": (lambda f: write(f / "vae/config.json", ""), "vae/config.json is no JSON"),
    "config not there": (lambda f: (f / "text_encoder/config.json").unlink(), "text_encoder/config.json is missing"),
    "schedule that is no JSON": (
        lambda f: write(f / "scheduler/scheduler_config.json", "{"),
        "scheduler/scheduler_config.json is no JSON",
    ),
    "no tokenizer": (lambda f: shutil.rmtree(f / "tokenizer"), "/tokenizer is missing: "),
    "no words": (lambda f: (f / "tokenizer/tokenizer.json").unlink(), "/tokenizer holds no vocabulary (tokenizer.json"),
    "no transformer": (lambda f: shutil.rmtree(f / "transformer"), "/transformer is missing: "),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "/transformer holds no weights"),
    "weights cut off": (lambda f: cut(f / WEIGHTS), f"{WEIGHTS} is cut off or no safetensors file"),
    "shard not there": (
        lambda f: write(f / "vae/x.safetensors.index.json", '{"weight_map": {"a": "x-2.safetensors"}}'),
        "vae/x-2.safetensors is missing: x.safetensors.index.json names it",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_one_line_with_the_files_name(name, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(), folder)
    check_model_folder(DiffusionModelConfig(path=str(folder)))
    break_it, said = CASES[name]
    break_it(folder)
    for cached in (read_index, read_component_config):
        cached.cache_clear()
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        check_model_folder(DiffusionModelConfig(path=str(folder)))
    line = users_mistake(caught.value)
    assert said in line and str(folder) in line and "\n" not in line


@pytest.mark.parametrize("architecture", [*_BUILTIN, "WanPipeline-2.2"])
def test_whole_folders_of_every_architecture_pass(architecture):
    check_model_folder(DiffusionModelConfig(path=str(tiny_checkpoint(architecture))))


def test_weights_that_lack_what_the_config_asks_for_are_no_model(tmp_path):
    """diffusers leaves such layers random, and a run would train them."""
    folder = shutil.copytree(tiny_checkpoint(QWEN), tmp_path / "model")
    edit(folder / CONFIG, num_layers=3)
    with pytest.raises(ValueError, match="tensors that its weights do not have, such as transformer_blocks.2."):
        load_component(DiffusionModelConfig(path=str(folder)), "transformer", torch.float32)
