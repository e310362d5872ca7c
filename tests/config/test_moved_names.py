"""Settings that every engine reads stand in actor.engine; where documents still call them FSDP's, they work."""

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tiny_models import tiny_checkpoint

from verl_omni.config import EngineConfig, FSDPConfig
from verl_omni.config.knob import UNSAID, moved_names, walk
from verl_omni.config.schema import DiffusionTrainerConfig, register
from verl_omni.trainer.checks.preparation import prepare_config

register()

ACTOR = "actor_rollout_ref.actor"
GIVEN = {
    "dtype": "bfloat16", "model_dtype": "float32", "use_torch_compile": "false", "compile_ahead": "false",
    "fold_lora": "false", "fused_gelu": "false", "attention_backend": "native", "param_offload": "true",
    "optimizer_offload": "true", "seed": "3",
}  # fmt: skip
LATER = {"activation_memory_budget", "fp8_modules", "sample_offload"}  # of the engine from the beginning


def prepared(*overrides: str):
    needed = [f"actor_rollout_ref.model.path={tiny_checkpoint()}", "data.train_files=prompts.parquet"]
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        return prepare_config(compose("diffusion_trainer", [*needed, *overrides]))


def test_all_that_moved_is_in_the_engines_settings():
    names = {knob.name for knob in walk(DiffusionTrainerConfig)}
    moved = moved_names(DiffusionTrainerConfig)
    words = [name for name in moved if name.endswith(".strategy")]  # other words for it, in documents on VeOmni
    assert {moved.pop(name) for name in words} == {f"{ACTOR}.strategy"} and len(words) == 2
    fields = set(EngineConfig.__dataclass_fields__) - LATER
    assert {name.rpartition(".")[2] for name in moved} == set(GIVEN) == fields
    assert set(moved.values()) <= names and names.isdisjoint(moved), "--help lists each once, under its own name"


def test_an_earlier_name_sets_the_knob_and_one_line_says_the_new_one(capsys):
    config = prepared(*(f"{ACTOR}.fsdp_config.{name}={value}" for name, value in GIVEN.items()))
    lines = capsys.readouterr().err.splitlines()
    for name, value in GIVEN.items():
        assert str(OmegaConf.select(config, f"{ACTOR}.engine.{name}")).lower() == value
        earlier, now = f"{ACTOR}.fsdp_config.{name}", f"{ACTOR}.engine.{name}"
        assert f"{earlier} is called {now} now: {now}={value}" in lines
    assert set(OmegaConf.select(config, f"{ACTOR}.fsdp_config").values()) >= {UNSAID}
    prepared(*(f"{ACTOR}.engine.{name}={value}" for name, value in GIVEN.items()))
    assert capsys.readouterr().err == "", "who types the new name is told nothing"


def test_an_earlier_name_overrides_what_a_recipe_says_of_the_new_one():
    config = prepared(f"{ACTOR}.engine.param_offload=true", f"{ACTOR}.fsdp_config.param_offload=false")
    assert config.actor_rollout_ref.actor.engine.param_offload is False
    config = prepared(f"{ACTOR}.engine.dtype=bfloat16", f"{ACTOR}.fsdp_config.dtype=null")
    assert config.actor_rollout_ref.actor.engine.dtype is None


def test_an_earlier_name_is_checked_like_the_new_one():
    with pytest.raises(ValueError, match=r"param_offload=maybe, which is called .*engine.param_offload now"):
        prepared(f"{ACTOR}.fsdp_config.param_offload=maybe")
    with pytest.raises(ValueError, match=r'unknown actor_rollout_ref.actor.engine.dtype "bfloat": did you mean'):
        prepared(f"{ACTOR}.fsdp_config.dtype=bfloat")


def test_an_engine_that_is_given_fsdps_settings_alone_finds_them_there():
    own = FSDPConfig(dtype="bfloat16", fsdp_size=2)
    assert EngineConfig.within(own) == EngineConfig(dtype="bfloat16")
    assert own.param_offload == UNSAID
