"""actor_rollout_ref.rollout.name=vllm_omni: what it cannot do is one line, before a worker starts."""

import json
import shutil

import pytest
from e2e_runs import settings
from PIL import Image
from tiny_models import tiny_checkpoint

from verl_omni.pipelines import vllm_omni
from verl_omni.pipelines.adapter_registry import AdapterRegistry
from verl_omni.testing.local_trainer import local_config
from verl_omni.utils.json_files import read_object
from verl_omni.workers.rollout.vllm_rollout import checks

A = "actor_rollout_ref."
SERVER = [f"{A}rollout.name=vllm_omni", f"{A}hybrid_engine=false"]
CASES = {
    "compiled VAE": ([f"{A}rollout.compile_vae=false"], "rollout.compile_vae=false does nothing with actor_"),
    "encoders": ([f"{A}rollout.encoder_offload=true"], "rollout.encoder_offload=true does nothing with"),
    "random weights": ([f"{A}model.load_format=dummy"], "model.load_format=dummy: vLLM-Omni reads the model's folder"),
    "folded LoRA": (
        [f"{A}hybrid_engine=true", f"{A}model.lora_rank=4", f"{A}actor.engine.fold_lora=true"],
        "fold_lora=true does nothing with actor_rollout_ref.rollout.name=vllm_omni",
    ),
    "8 bits": ([f"{A}rollout.precision=fp8"], "vllm_omni quantises the weights that it reads from the model's folder"),
    "engine argument": ([f"+{A}rollout.engine_kwargs.decode_batch=1"], 'did you mean "decode_batch_size"'),
}


@pytest.fixture
def there(monkeypatch):
    """As if vllm-omni were installed: nothing of it is imported before a worker starts."""
    monkeypatch.setattr(checks, "installed", lambda: True)
    monkeypatch.setattr(vllm_omni.VllmOmniPipelineBase.registry, "builtin", vllm_omni._BUILTIN)


def checked(*overrides: str, model: str = "QwenImagePipeline") -> None:
    local_config(settings("run", *SERVER, *overrides, model=tiny_checkpoint(model)))


def one_line(*overrides: str, **kwargs: str) -> str:
    with pytest.raises(ValueError) as caught:
        checked(*overrides, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_it_is_accepted_where_it_is_installed(there):
    checked()
    checked(f"{A}hybrid_engine=true", "trainer.n_gpus_per_node=2")
    checked("trainer.mode=one_step_off")


@pytest.mark.parametrize("name", CASES)
def test_what_it_cannot_do_is_said(there, name):
    overrides, said = CASES[name]
    assert said in one_line(*overrides)


def test_without_the_package_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(checks, "installed", lambda: False)
    line = one_line()
    assert "vllm-omni is not installed here: type make vllm-omni" in line and "or choose diffusers" in line
    assert "on a CPU without a clone, pip install 'verl-omni[vllm-omni-cpu]' and VLLM_TARGET_DEVICE=empty" in line


def test_stable_diffusion_without_t5_is_refused(there, tmp_path):
    folder = shutil.copytree(tiny_checkpoint("StableDiffusion3Pipeline"), tmp_path / "model")
    checked(model="StableDiffusion3Pipeline")
    index = read_object(folder / "model_index.json") | {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))
    assert "StableDiffusion3Pipeline needs a text_encoder_3" in one_line(f"{A}model.path={folder}")


def test_a_model_with_an_adapter_is_accepted(there, tmp_path):
    checked(model="Flux2Pipeline")
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a cat", "images": [str(tmp_path / "a.png")]}) + "\n")
    rows = [f"data.train_files={tmp_path / 'a.jsonl'}", "data.train_batch_size=1", "data.val_files=null"]
    one = [f"{A}actor.ppo_mini_batch_size=1", "reward.scorers=[{name: jpeg_compressibility}]"]
    checked(*rows, *one, model="QwenImageEditPlusPipeline")


def test_a_model_without_an_adapter_names_those_that_have_one(there, monkeypatch):
    some = {name: vllm_omni._BUILTIN[name] for name in ("ZImagePipeline", "FluxPipeline")}
    monkeypatch.setattr(vllm_omni.VllmOmniPipelineBase, "registry", AdapterRegistry("vLLM-Omni rollout", some))
    line = one_line(model="WanPipeline")
    assert "no vLLM-Omni rollout adapter is registered for WanPipeline, only for FluxPipeline, ZImagePipeline" in line
