"""A model folder with something wrong: one line that names the file, before any worker starts."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_checkpoint

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.builtin import BUILTIN
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.model_folder import check_model_folder
from verl_omni.pipelines.utils import load_component, read_component_config, read_index
from verl_omni.trainer.failures import users_mistake
from verl_omni.workers.rollout.vllm_rollout.engine import build_engine

QWEN = "QwenImagePipeline"


def edit(path: Path, **changes) -> None:
    """Change keys of a JSON file; None takes one away."""
    held = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in held.items() if v is not None}))


def write(path: Path, text: str) -> None:
    path.write_text(text)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def behind_a_link(folder: Path, change) -> None:
    """The text encoder in a hidden folder, which a link names."""
    change((folder / "text_encoder").rename(folder / ".hidden"))
    (folder / "text_encoder").symlink_to(".hidden")


def elsewhere(folder: Path, name: str) -> Path:
    place = folder.with_name("elsewhere")
    place.mkdir()
    write(place / name, "")
    return place


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
    "shard elsewhere": (
        lambda f: write(f / "vae/x.safetensors.index.json", '{"weight_map": {"a": "../x.safetensors"}}'),
        "x.safetensors.index.json names ../x.safetensors, which lies outside",
    ),
    "weights that are a pipe": (
        lambda f: ((f / WEIGHTS).unlink(), os.mkfifo(f / WEIGHTS)), f"{WEIGHTS} is no regular file"
    ),
    "weights that are a pickle": (
        lambda f: (f / WEIGHTS).rename(f / "transformer/diffusion_pytorch_model.bin"),
        "/transformer holds its weights as a pickle (diffusion_pytorch_model.bin), which can run code when it is read",
    ),
    # What would run.
    "another library": (lambda f: edit(f / INDEX, vae=["mm5.helper", "VAE"]), "\"vae\" from the library 'mm5.helper'"),
    "another library for a component that nobody needs": (
        lambda f: edit(f / INDEX, extra=["mm5.helper", "Extra"]), "\"extra\" from the library 'mm5.helper'"
    ),
    "a list of libraries": (lambda f: edit(f / INDEX, vae=[["mm5"], "VAE"]), 'expected ["library", "class"]'),
    "a pipeline of its own": (lambda f: edit(f / INDEX, _class_name=["mine", "Mine"]), f"{INDEX} "),
    "a program": (lambda f: write(f / "pipeline.py", ""), "pipeline.py is a program"),
    "a program in a component": (lambda f: write(f / "vae/helper.py", ""), "vae/helper.py is a program"),
    "a pipeline in a component": (
        lambda f: write(f / "vae/model_index.json", "{}"), "vae/model_index.json would have another model loaded"
    ),
    "an adapter in a component": (
        lambda f: write(f / "text_encoder/adapter_config.json", '{"base_model_name_or_path": "someone/else"}'),
        "text_encoder/adapter_config.json would have another model loaded",
    ),
    "code for the text encoder": (
        lambda f: edit(f / "text_encoder/config.json", auto_map={"AutoModel": "m.M"}), 'has "auto_map"'
    ),
    "code inside a part of a config": (
        lambda f: edit(f / "text_encoder/config.json", deep=[{"x": {"auto_map": {"AutoModel": "m.M"}}}]),
        'has "auto_map"',
    ),
    "code for the tokenizer": (
        lambda f: edit(f / "tokenizer/tokenizer_config.json", auto_map={"AutoTokenizer": ["m.T", None]}),
        'has "auto_map"',
    ),
    "trust": (lambda f: edit(f / "text_encoder/config.json", trust_remote_code=True), 'has "trust_remote_code": True'),
    "a kernel from the hub": (
        lambda f: edit(f / "text_encoder/config.json", attn_implementation="someone/kernel"),
        'has "attn_implementation": \'someone/kernel\', a kernel that would be downloaded and run',
    ),
    "a config in the place of another": (
        lambda f: edit(f / "text_encoder/config.json", configuration_files=["config.4.0.0.json"]),
        'has "configuration_files": [',
    ),
    "a kernel behind a link": (
        lambda f: behind_a_link(f, lambda p: edit(p / "config.json", _attn_implementation="someone/kernel")),
        "text_encoder/config.json has \"_attn_implementation\": 'someone/kernel'",
    ),
    "a program behind a link": (
        lambda f: behind_a_link(f, lambda p: write(p / "helper.py", "")), "text_encoder/helper.py is a program"
    ),
    "a program behind two links": (
        lambda f: behind_a_link(f, lambda p: (p / "more").symlink_to(elsewhere(f, "helper.py"))),
        "text_encoder/more/helper.py is a program",
    ),
    "a link to where it lies": (lambda f: (f / "vae/more").symlink_to(f), "vae/more is a link to a folder"),
    "a link to itself": (lambda f: (f / "vae/more").symlink_to("."), "vae/more is a link to a folder that it lies"),
    "a scheduler of its own": (
        lambda f: edit(f / "scheduler/scheduler_config.json", _class_name=["mine", "Mine"]), 'has "_class_name": [',
    ),
}  # fmt: skip


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


MODULAR = "MiniMaxH3ModularPipeline"
TOLD = {"pretrained_model_name_or_path": "somebody/else", "subfolder": "vae"}
MODULAR_CASES = {
    "another library": (["mm5.helper", "VAE", TOLD], "\"vae\" from the library 'mm5.helper', which would be"),
    "another library before anything was loaded": (
        [None, None, TOLD | {"type_hint": ["mm5.helper", "VAE"]}], "\"vae\" from the library 'mm5.helper', which"
    ),
    "no class": ([None, None, TOLD | {"type_hint": None}], '"vae": null: expected ["library", "class"]'),
    "nowhere": ([None, None, {"subfolder": "vae"}], 'names no class for "vae"'),
    "another folder": (
        ["diffusers", "AutoencoderKLMiniMaxH3", TOLD | {"subfolder": "../vae"}],
        "has \"vae\" in the folder '../vae': expected \"vae\"",
    ),
    "class of another model": (
        ["diffusers", "AutoencoderKL", TOLD], f"of the class AutoencoderKL: a {MODULAR} has a AutoencoderKLMiniMaxH3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULAR_CASES)
def test_what_is_wrong_with_the_folder_of_a_modular_pipeline_is_one_line(name, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(MODULAR), tmp_path / "model")
    entry, said = MODULAR_CASES[name]
    edit(folder / "modular_model_index.json", vae=entry)
    with pytest.raises(ValueError) as caught:
        check_model_folder(DiffusionModelConfig(path=str(folder)))
    line = users_mistake(caught.value)
    assert said in line and str(folder / "modular_model_index.json") in line and "\n" not in line


def test_a_modular_pipeline_is_read_from_its_own_folder(tmp_path):
    """Wherever else its index says that components are, before anything was loaded or after."""
    folder = shutil.copytree(tiny_checkpoint(MODULAR), tmp_path / "model")
    index = json.loads((folder / "modular_model_index.json").read_text())
    for name, entry in index.items():
        if isinstance(entry, list) and entry[0] is not None:
            index[name] = [None, None, entry[2] | {"pretrained_model_name_or_path": "somebody/else"}]
    write(folder / "modular_model_index.json", json.dumps(index))
    model = DiffusionModelConfig(path=str(folder))
    check_model_folder(model)
    pipe = DiffusionModelBase.get_class(model).load_pipeline(model, "cpu", torch.float32)
    assert {name for name in ("text_encoder", "tokenizer", "vae", "audio_vae") if getattr(pipe, name) is None} == set()
    assert pipe.transformer is None and pipe.scheduler is None


def test_minimax_h3_with_a_diffusers_that_has_none(monkeypatch):
    model = DiffusionModelConfig(path=str(tiny_checkpoint(QWEN)), architecture=MODULAR)
    monkeypatch.setattr("verl_omni.pipelines.minimax_h3.adapter.diffusers_since", lambda release: False)
    with pytest.raises(ValueError, match="^MiniMax-H3 needs diffusers 0.40 or later, and 0.[0-9.]+ is installed$"):
        DiffusionModelBase.get_class(model).check(model)


@pytest.mark.parametrize("architecture", [*BUILTIN, "WanPipeline-2.2"])
def test_whole_folders_of_every_architecture_pass(architecture):
    check_model_folder(DiffusionModelConfig(path=str(tiny_checkpoint(architecture))))


def test_weights_that_lack_what_the_config_asks_for_are_no_model(tmp_path):
    """diffusers leaves such layers random, and a run would train them."""
    folder = shutil.copytree(tiny_checkpoint(QWEN), tmp_path / "model")
    edit(folder / CONFIG, num_layers=3)
    with pytest.raises(ValueError, match="tensors that its weights do not have, such as transformer_blocks.2."):
        load_component(DiffusionModelConfig(path=str(folder)), "transformer", torch.float32)


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A folder whose VAE comes from a module that leaves a trace when it is imported."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/stranger_helper.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass VAE: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    folder = shutil.copytree(tiny_checkpoint(QWEN), tmp_path / "model")
    edit(folder / INDEX, vae=["stranger_helper", "VAE"])
    yield DiffusionModelConfig(path=str(folder))
    sys.modules.pop("stranger_helper", None)


def test_a_strangers_module_is_not_imported(stranger, tmp_path):
    adapter = DiffusionModelBase.get_class(stranger)
    loaders = (
        check_model_folder,
        lambda model: adapter.load_pipeline(model, "cpu", torch.float32),
        lambda model: build_engine(None, model, torch.float32, compiled=False),  # vLLM-Omni's
    )
    for load in loaders:
        with pytest.raises(ValueError, match="from the library 'stranger_helper', which would be imported"):
            load(stranger)
    assert not (tmp_path / "ran").exists()
    importlib.import_module("stranger_helper")
    assert (tmp_path / "ran").exists(), "the trace is left where the module is imported"


def test_a_module_that_the_adapter_names_is_let_in(stranger, monkeypatch):
    monkeypatch.setattr(DiffusionModelBase.get_class(stranger), "libraries", ("stranger_helper",))
    check_model_folder(stranger)


def test_what_lies_in_hidden_folders_is_nobodys(tmp_path):
    folder = shutil.copytree(tiny_checkpoint(QWEN), tmp_path / "model")
    (folder / ".git/hooks").mkdir(parents=True)
    (folder / ".git/hooks/run.py").write_text("")
    check_model_folder(DiffusionModelConfig(path=str(folder)))


def test_folders_and_files_behind_links_are_models_too(tmp_path):
    """A component that several models share, and the files of a hub's cache."""
    folder, blobs = shutil.copytree(tiny_checkpoint(QWEN), tmp_path / "model"), tmp_path / "blobs"
    blobs.mkdir()
    (folder / "vae").rename(tmp_path / "vae")
    (folder / "vae").symlink_to("../vae")
    for number, path in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    for again in ("one", "two"):
        (folder / again).symlink_to("vae")
    check_model_folder(DiffusionModelConfig(path=str(folder)))


def test_a_start_says_nothing_of_modular_pipelines(tmp_path):
    """diffusers has a warning for whoever imports them, which stood among the first lines of every run."""
    looks = (
        "import sys; from verl_omni.testing.tiny_random import build_tiny_random\n"
        "from verl_omni.config import DiffusionModelConfig\n"
        "from verl_omni.pipelines.model_folder import check_model_folder\n"
        "check_model_folder(DiffusionModelConfig(path=str(build_tiny_random('QwenImagePipeline', sys.argv[1]))))\n"
    )
    done = subprocess.run([sys.executable, "-c", looks, tmp_path / "m"], capture_output=True, text=True, check=True)
    assert "Modular" not in done.stdout + done.stderr
