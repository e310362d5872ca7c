"""What null means on a GPU and on a CPU: compiled graphs, compiling ahead, folded LoRA, dtypes, FLOPs."""

import math
from types import SimpleNamespace

import pytest
import torch
from e2e_runs import metrics, settings
from engine_cases import make_engine, model_config
from peft.tuners.lora import LoraLayer
from tiny_models import tiny_checkpoint

from verl_omni.config import EngineConfig
from verl_omni.perf.flops import peak_flops
from verl_omni.testing.local_trainer import local_config, local_trainer
from verl_omni.workers.engine.compile.blocks import repeated_blocks
from verl_omni.workers.engine.module import on_gpu, resolve_dtypes
from verl_omni.workers.layout import Layout

SD3 = "StableDiffusion3Pipeline"  # its VAE is one for images
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def trainer(folder):
    """Of the command with a LoRA and nothing said of how it is computed, on what this machine has."""
    arguments = settings(
        folder, "actor_rollout_ref.model.lora_rank=4", "trainer.total_training_steps=1", "data.val_files=null",
        "actor_rollout_ref.rollout.pipeline.guidance_scale=1", model=tiny_checkpoint(SD3),
    )  # fmt: skip
    return local_trainer(local_config(arguments))


def test_nothing_of_it_on_a_cpu(tmp_path):
    worker = trainer(tmp_path).actor_wg.worker
    engine = worker.engine
    assert engine.device == CPU and engine.dtype == torch.float32
    assert not engine.compiled and engine.folded_lora is None
    blocks = [block for part in engine.parts.values() for block in repeated_blocks(part)]
    assert blocks and not any("forward" in vars(block) for block in blocks), "the forward of their class"
    assert not worker.rollout.compiled_vae and worker.flop_meter is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU (pytest -m gpu)")
def test_all_of_it_on_a_gpu(tmp_path, recwarn):
    run = trainer(tmp_path)
    worker = run.actor_wg.worker
    engine = worker.engine
    assert engine.device.type == "cuda" and engine.dtype == torch.bfloat16
    assert engine.compiled and engine.folded_lora is not None
    blocks = [block for part in engine.parts.values() for block in repeated_blocks(part)]
    assert blocks and all("forward" in vars(block) for block in blocks)
    assert worker.rollout.compiled_vae and (worker.flop_meter is not None) == (peak_flops() is not None)
    run.fit()
    assert math.isfinite(metrics(tmp_path)[1]["actor/grad_norm"])
    assert not [str(w.message) for w in recwarn if "compiling ahead failed" in str(w.message)]


@pytest.mark.parametrize("name", ["use_torch_compile", "compile_ahead", "fused_gelu"])
def test_null_is_the_devices_choice(name):
    default = getattr(EngineConfig(), name)
    assert default is None and on_gpu(default, GPU) and not on_gpu(default, CPU)
    for device in (CPU, GPU):
        assert on_gpu(True, device) and not on_gpu(False, device)


def test_dtypes():
    """Half precision on a GPU; what an optimizer moves is held in float32, what LoRA leaves as it is need not be."""
    assert resolve_dtypes(EngineConfig(), CPU, lora=False) == resolve_dtypes(EngineConfig(), CPU, lora=True)
    assert resolve_dtypes(EngineConfig(), CPU, lora=True) == (torch.float32, torch.float32)
    assert resolve_dtypes(EngineConfig(), GPU, lora=False) == (torch.bfloat16, torch.float32)
    assert resolve_dtypes(EngineConfig(), GPU, lora=True) == (torch.bfloat16, torch.bfloat16)
    asked = EngineConfig(dtype="bfloat16", model_dtype="float32")
    assert resolve_dtypes(asked, GPU, lora=True) == (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="set actor_rollout_ref.actor.engine.dtype=bfloat16 too"):
        resolve_dtypes(EngineConfig(model_dtype="bfloat16"), CPU, lora=False)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet(name, peak, monkeypatch):
    """Without one there is no perf/mfu, and nothing is counted."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
    assert peak_flops() == peak


def test_lora_is_folded_where_a_quarter_of_the_memory_stays_free(monkeypatch):
    engine = make_engine(model_config(tiny_checkpoint(SD3), lora=True))
    (transformer,) = engine.parts.values()
    weights = sum(p.numel() * p.element_size() for p in transformer.parameters())
    adapted = [m.base_layer.weight for m in transformer.modules() if isinstance(m, LoraLayer)]
    copies = sum(w.numel() * w.element_size() for w in adapted)
    assert 0 < copies < weights

    def folds(memory: float) -> bool:
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
        return engine._folds_lora()

    needed = (weights + copies) / 0.75
    assert not folds(1e12), "not on a CPU"
    monkeypatch.setattr(engine, "device", GPU)
    assert folds(needed + 2) and not folds(needed - 2)
    monkeypatch.setattr(engine.common, "param_offload", True)
    assert not folds(1e12), "the weights are not to stay on the device"
    monkeypatch.setattr(engine.common, "param_offload", False)
    monkeypatch.setattr(engine, "layout", Layout(shard=2))
    assert not folds(1e12), "a rank has only its share"
