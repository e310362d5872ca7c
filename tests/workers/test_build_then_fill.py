"""A model is built without weights, spread, and filled by each rank with its own part: the same as loaded whole."""

import shutil
import warnings

import diffusers
import pytest
import torch
import torch.distributed as dist
from engine_cases import make_engine, model_config, whole
from peft import LoraConfig
from ranks import start_ranks
from safetensors.torch import save_file
from tiny_models import tiny_checkpoint

from verl_omni.config import CheckpointConfig, DiffusionModelConfig, FSDPConfig, OptimizerConfig
from verl_omni.pipelines.builtin import BUILTIN
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.qwen_image.adapter import QwenImage
from verl_omni.pipelines.utils import load_component
from verl_omni.pipelines.wan.adapter import Wan
from verl_omni.pipelines.weights import FolderTensors, RandomTensors, fill, parameters_on_meta
from verl_omni.utils.seeds import derive_seed
from verl_omni.workers.engine.fsdp.diffusers_impl import DiffusersFSDPEngine
from verl_omni.workers.engine.module import build_module, fill_module

ARCHITECTURES = [*BUILTIN, "WanPipeline-2.2"]
QWEN, TWO = "QwenImagePipeline", "WanPipeline-2.2"


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that a model computes with, what it does not save included."""
    return {n.replace(".base_layer.", "."): whole(t) for n, t in (*model.named_parameters(), *model.named_buffers())}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), name


def by_diffusers(path: str, part: str, dtype: torch.dtype) -> torch.nn.Module:
    """The whole model, as diffusers loads it."""
    config = DiffusionModelConfig(path=str(path))
    return load_component(config, part, dtype)


def with_lora(path: str, parts: list[str], dtype: torch.dtype, targets: list[str]) -> dict[str, torch.nn.Module]:
    """What peft makes of models that were loaded whole."""
    torch.manual_seed(derive_seed(0, "initial weights"))
    models = {part: by_diffusers(path, part, dtype) for part in parts}
    for model in models.values():
        lora = LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian", target_modules=targets)
        model.requires_grad_(False).add_adapter(lora)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.float() if ".lora_" in name else parameter.data
    return models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_filled_is_what_diffusers_loads(architecture, dtype):
    """Rotary tables that are in no file, positions that are, layers that stay in float32."""
    config = DiffusionModelConfig(path=str(tiny_checkpoint(architecture)))
    adapter = DiffusionModelBase.get_class(config)
    built = adapter.build_module(config, dtype)
    assert all(parameter.is_meta for parameter in built.parameters())
    for name, part in adapter.trained_modules(adapter.load_module(config, dtype)).items():
        expected = by_diffusers(config.path, name, dtype)
        assert_equal(state(part), state(expected))
        assert part.config == expected.config and part.training == expected.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", [QWEN, TWO])
def test_lora_begins_with_the_values_of_a_model_that_is_loaded_whole(architecture, dtype):
    path = tiny_checkpoint(architecture)
    config = model_config(path, lora=True)
    module, parts = build_module(config, 0, dtype, None)
    fill_module(module, config, torch.device("cpu"), dtype)
    targets = DiffusionModelBase.get_class(config).lora_target_modules
    for name, expected in with_lora(path, list(parts), dtype, targets).items():
        assert_equal(state(parts[name]), state(expected))


def one_of_two_ranks(rank: int, folder: str, paths: dict[str, str]) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
    read, seen = FolderTensors.read, []

    def counted(self, name, region):
        value = read(self, name, region)
        seen.append(value.numel())
        return value

    FolderTensors.read = counted
    for architecture, path in paths.items():
        for lora in (False, True):
            seen.clear()
            config = model_config(path, lora=lora)
            settings = FSDPConfig(dtype="bfloat16", model_dtype="bfloat16" if lora else None)
            engine = DiffusersFSDPEngine(config, settings, OptimizerConfig(), CheckpointConfig())
            engine.initialize()
            own = sum(p.to_local().numel() for n, p in engine.module.named_parameters() if ".lora_" not in n)
            tables = sum(b.numel() for b in engine.module.buffers())
            assert own <= sum(seen) <= own + tables, f"{architecture}: a rank reads what it holds, and no more"
            dtype = torch.bfloat16 if lora else torch.float32
            if lora:
                expected = with_lora(path, list(engine.parts), dtype, engine.adapter.lora_target_modules)
            else:
                expected = {name: by_diffusers(path, name, dtype) for name in engine.parts}
            for name, part in engine.parts.items():
                assert_equal(state(part), state(expected[name]))
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_read_half_each_of_the_same_model(tmp_path):
    start_ranks(one_of_two_ranks, (str(tmp_path), {name: str(tiny_checkpoint(name)) for name in (QWEN, TWO)}))


def test_weights_in_several_files_are_those_of_one(tmp_path):
    whole_folder, folder = tiny_checkpoint(QWEN), tmp_path / "model"
    shutil.copytree(whole_folder, folder)
    shutil.rmtree(folder / "transformer")
    diffusers.QwenImageTransformer2DModel.from_pretrained(whole_folder / "transformer").save_pretrained(
        folder / "transformer", max_shard_size="100KB"
    )
    assert len(list((folder / "transformer").glob("*.safetensors"))) > 2
    loaded = QwenImage.load_module(DiffusionModelConfig(path=str(folder)), torch.float32)
    assert_equal(state(loaded), state(by_diffusers(whole_folder, "transformer", torch.float32)))


class Tied(torch.nn.Module):
    """Two layers of one weight, as language models have them; files hold it under one of the names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("name", ["first.weight", "second.weight"])
def test_tied_weights_stay_tied(tmp_path, name):
    value = torch.arange(9.0).view(3, 3)
    save_file({name: value}, tmp_path / "diffusion_pytorch_model.safetensors")
    with parameters_on_meta():
        module = Tied()
    fill(module, FolderTensors(str(tmp_path)), "cpu", torch.float32)
    assert module.first.weight is module.second.weight and torch.equal(module.first.weight, value)
    assert len(list(module.parameters())) == 1


def test_weights_of_another_shape_are_refused_and_those_without_a_place_are_named(tmp_path):
    with parameters_on_meta():
        layer = torch.nn.Linear(3, 2)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file({"weight": torch.ones(2, 4), "bias": torch.ones(2)}, file)
    with pytest.raises(ValueError, match=r"weight of shape \(2, 3\), and its weights have \(2, 4\)"):
        fill(layer, FolderTensors(str(tmp_path)), "cpu", torch.float32)
    assert layer.bias.is_meta, "nothing is touched"
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2), "gate": torch.ones(2)}, file)
    with pytest.warns(UserWarning, match="1 tensors that a Linear has no place for, such as gate"):
        fill(layer, FolderTensors(str(tmp_path)), "cpu", torch.float32)


def test_random_weights_are_the_same_of_a_name_whatever_part_is_read():
    with parameters_on_meta():
        layers = {"a": torch.nn.Linear(4, 6), "b": torch.nn.Linear(4, 6), "norm": torch.nn.LayerNorm(4)}
        model = torch.nn.ModuleDict(layers)
    model.register_buffer("table", torch.arange(3.0))
    random = RandomTensors(model)
    one = random.read("a.weight", ())
    assert torch.equal(random.read("a.weight", (slice(2, 5), slice(0, 4))), one[2:5])
    assert not torch.equal(random.read("b.weight", ()), one)
    assert torch.equal(random.read("norm.weight", ()), torch.ones(4, dtype=torch.bfloat16))
    assert random.read("a.bias", ()).abs().max() > 0 and one.abs().max() <= 0.5
    assert random.read("table", ()).tolist() == [0, 1, 2]
    fill(model, random, "cpu", torch.float32)
    assert torch.equal(model["a"].weight, one.float())


class LoadsWhole(QwenImage):
    """As adapters were written before modules were built first."""

    @classmethod
    def load_module(cls, model_config, dtype):
        module = super().load_module(model_config, dtype)
        module.loaded_by = cls.__name__
        return module


class LoadsBoth(Wan):
    """One whose parent builds: what it says itself comes first."""

    load_module = LoadsWhole.load_module


def test_an_adapter_with_its_own_load_module_goes_on_working(monkeypatch):
    assert LoadsWhole.loads_whole() and LoadsBoth.loads_whole()
    assert not (QwenImage.loads_whole() or Wan.loads_whole())
    config = model_config(tiny_checkpoint(QWEN), lora=True)
    expected = make_engine(config)
    monkeypatch.setattr(DiffusionModelBase, "get_class", classmethod(lambda cls, config: LoadsWhole))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = make_engine(config)
    assert engine.module.loaded_by == "LoadsWhole"
    assert_equal(state(engine.module), state(expected.module))


class WithMore(QwenImage):
    @classmethod
    def build_module(cls, model_config, dtype):
        module = super().build_module(model_config, dtype)
        more = torch.nn.ModuleDict({"transformer": module, "head": torch.nn.Linear(2, 2, device="meta")})
        return more

    @classmethod
    def trained_modules(cls, module):
        return {"transformer": module["transformer"]}


def test_what_no_part_holds_has_no_values_to_read(monkeypatch):
    monkeypatch.setattr(DiffusionModelBase, "get_class", classmethod(lambda cls, config: WithMore))
    with pytest.raises(ValueError, match=r"WithMore.build_module has head.weight, which is in none of its trained_mod"):
        make_engine(model_config(tiny_checkpoint(QWEN)))
