"""A writer is built without weights, spread, and filled by each rank with its own part: as transformers loads it."""

import os

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import start_ranks
from safetensors.torch import load_file, save_file
from tiny_language_model import language_model_folder
from tiny_models import tiny_checkpoint

from verl_omni.config import CheckpointConfig, DiffusionModelConfig, FSDPConfig, OptimizerConfig
from verl_omni.pipelines.causal_lm import writer_of
from verl_omni.pipelines.weights import FolderTensors
from verl_omni.workers.engine.fsdp.diffusers_impl import DiffusersFSDPEngine


def folders(tmp_path) -> dict[str, str]:
    """Tied, with a layer of its own for the logits, in several files, and one that writes tokens of images."""
    from transformers import AutoModelForCausalLM

    tied = str(language_model_folder())
    model = AutoModelForCausalLM.from_pretrained(tied)
    assert model.config.tie_word_embeddings
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    config = type(model.config).from_pretrained(tied, tie_word_embeddings=False)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "untied")
    images = str(tiny_checkpoint("GlmImagePipeline") / "vision_language_encoder")
    return {"tied": tied, "untied": f"{tmp_path}/untied", "sharded": f"{tmp_path}/sharded", "images": images}


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that it computes with, what it does not save included."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in named}


def by_transformers(path: str, dtype: torch.dtype) -> torch.nn.Module:
    architecture, _ = writer_of(path)
    return getattr(transformers, architecture).from_pretrained(path, dtype=dtype)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tied", "untied", "sharded", "images"])
def test_what_is_filled_is_what_transformers_loads(kind, dtype, tmp_path, capsys):
    path = folders(tmp_path)[kind]
    architecture, adapter = writer_of(path)
    assert not adapter.loads_whole()
    config = DiffusionModelConfig(path=path, architecture=architecture)
    built = adapter.build_module(config, dtype)
    assert all(parameter.is_meta for parameter in built.parameters())
    loaded, expected = adapter.load_module(config, dtype), by_transformers(path, dtype)
    assert_equal(state(loaded), state(expected))
    assert loaded.config.to_dict() == expected.config.to_dict() and not loaded.training
    assert loaded.config._attn_implementation == expected.config._attn_implementation
    assert loaded.generation_config.eos_token_id == expected.generation_config.eos_token_id
    assert (loaded.get_input_embeddings().weight is loaded.lm_head.weight) == (kind in ("tied", "sharded"))
    assert "reads the whole model" not in capsys.readouterr().out


def test_files_that_name_tensors_in_another_way_are_left_to_transformers(tmp_path, capsys):
    """As an older version wrote them: without the name of the model's one part."""
    path = folders(tmp_path)["untied"]
    file = f"{path}/model.safetensors"
    expected = state(by_transformers(path, torch.float32))
    save_file({n.removeprefix("model."): t for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    architecture, adapter = writer_of(path)
    loaded = adapter.load_module(DiffusionModelConfig(path=path, architecture=architecture), torch.float32)
    assert_equal(state(loaded), expected)
    assert "every rank reads the whole model, as its files hold model.embed_tokens.weight 0 times" in (
        capsys.readouterr().out
    )


def test_a_tensor_that_is_missing_is_not_left_random(tmp_path):
    path = folders(tmp_path)["untied"]
    file = f"{path}/model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n != "lm_head.weight"}, file, metadata={"format": "pt"})
    architecture, adapter = writer_of(path)
    with pytest.raises(ValueError, match="asks for 1 tensors that its weights do not have, such as lm_head.weight"):
        adapter.load_module(DiffusionModelConfig(path=path, architecture=architecture), torch.float32)


def one_of_two_ranks(rank: int, folder: str, paths: dict[str, str]) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(os.path.join(folder, "store"), 2))
    read, seen = FolderTensors.read, []

    def counted(self, name, region):
        value = read(self, name, region)
        seen.append(value.numel())
        return value

    FolderTensors.read = counted
    for path in paths.values():
        seen.clear()
        config = DiffusionModelConfig(path=path, architecture=writer_of(path)[0])
        engine = DiffusersFSDPEngine(config, FSDPConfig(), OptimizerConfig(), CheckpointConfig())
        engine.initialize()
        assert sum(seen) == sum(p.to_local().numel() for p in engine.module.parameters()), "a rank reads what it holds"
        assert_equal(state(engine.module), state(by_transformers(path, torch.float32)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_two_ranks_read_half_each_of_the_same_model(tmp_path):
    start_ranks(one_of_two_ranks, (str(tmp_path), folders(tmp_path)))
