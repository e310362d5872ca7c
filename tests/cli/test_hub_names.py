"""A run whose model and prompts are named on the hub: what is fetched when, and which commit it keeps to."""

import shutil
import sys
from pathlib import Path

import pytest
from composed import composed
from hub_mirror import mirror  # noqa: F401
from huggingface_hub import constants
from omegaconf import OmegaConf
from tiny_models import tiny_checkpoint
from tiny_runs import tiny_settings

from verl_omni.cli import check, tiny
from verl_omni.cli.trained import find_weights
from verl_omni.config.model import read_architecture
from verl_omni.trainer.checks.hub_names import fetch_models, models_of
from verl_omni.trainer.checks.preflight import preflight
from verl_omni.trainer.run_folder import record
from verl_omni.utils import hub

A = "actor_rollout_ref."
PROMPTS = '{"text": "a cat"}\n{"text": "a dog"}\n{"text": "a cow"}\n'


@pytest.fixture
def here(mirror, tmp_path, monkeypatch) -> Path:  # noqa: F811
    """A folder to work in; the hub has somebody/tiny and the prompts of somebody/animals."""
    mirror.sha = mirror.add("somebody/tiny", tiny_checkpoint())
    rows = tmp_path / "animals"
    rows.mkdir()
    (rows / "train.jsonl").write_text(PROMPTS)
    mirror.rows = mirror.add("somebody/animals", rows, kind="dataset")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(folder: Path, **more) -> list[str]:
    named = {
        f"{A}model.path": "somebody/tiny",
        "data.train_files": "hf://datasets/somebody/animals/train.jsonl",
        "data.prompt_key": "text",
    }
    return tiny_settings(folder, **named | more)


def test_names_stay_names_and_say_their_commit(here, mirror):  # noqa: F811
    config = preflight(composed(*settings(here)))
    assert (config.actor_rollout_ref.model.path, config.actor_rollout_ref.model.revision) == (
        "somebody/tiny",
        mirror.sha,
    )
    assert config.data.train_files == f"hf://datasets/somebody/animals@{mirror.rows}/train.jsonl"
    assert models_of(config) == [f"somebody/tiny@{mirror.sha}"]
    assert not any(name.endswith(".safetensors") for name in mirror.asked), "the weights come when all is checked"
    fetch_models(config)
    assert any(name.endswith(".safetensors") for name in mirror.asked)
    model = OmegaConf.to_object(config.actor_rollout_ref.model)
    assert str(hub.copied(model.path)) == f"somebody/tiny@{mirror.sha}"
    mirror.asked.clear()
    fetch_models(config)
    assert not mirror.asked


def test_a_mistake_costs_no_download(here, mirror):  # noqa: F811
    with pytest.raises(ValueError, match="optim.lr=-1"):
        preflight(composed(*settings(here, **{f"{A}actor.optim.lr": -1})))
    assert not any(name.endswith(".safetensors") for name in mirror.asked)


def test_a_run_goes_on_with_the_commit_that_it_began_with(here, mirror, tmp_path):  # noqa: F811
    began = preflight(composed(*settings(here)))
    (here / "run").mkdir()
    OmegaConf.save(began, here / "run/config.yaml")
    moved = mirror.add("somebody/tiny", shutil.copytree(tiny_checkpoint(), tmp_path / "moved"))
    hub._commit.cache_clear()
    assert preflight(composed(*settings(here))).actor_rollout_ref.model.revision == mirror.sha
    anew = preflight(composed(*settings(here, **{"trainer.resume_mode": "disable"})))
    assert anew.actor_rollout_ref.model.revision == moved
    named = preflight(composed(*settings(here, **{f"{A}model.revision": moved})))
    assert named.actor_rollout_ref.model.revision == moved


def test_the_same_weights_are_the_same_run_wherever_they_lie(here, mirror):  # noqa: F811
    hub.model_folder("somebody/tiny")
    named = record.describe(preflight(composed(*settings(here))))
    local = record.describe(preflight(composed(*settings(here, **{f"{A}model.path": tiny_checkpoint()}))))
    may, may_not = record.changes(named, local)
    assert not may_not


def test_a_revision_of_a_folder_is_refused(here):
    with pytest.raises(ValueError, match="revision=v1 has no effect: .* is no name on the hub"):
        preflight(composed(*settings(here, **{f"{A}model.path": tiny_checkpoint(), f"{A}model.revision": "v1"})))


def test_a_dry_run_of_names_alone(here, mirror, monkeypatch, capsys, process_group):  # noqa: F811
    monkeypatch.setattr(sys, "argv", ["verl-omni", *settings(here)])
    check.main()
    assert "A run with these settings can start." in capsys.readouterr().out
    # Once it is here, no network is needed.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub._commit.cache_clear()
    assert preflight(composed(*settings(here))).actor_rollout_ref.model.revision == mirror.sha


def test_weights_to_draw_with_by_name(here, mirror):  # noqa: F811
    found = find_weights("somebody/tiny")
    assert found.name == "tiny" and read_architecture(str(found.model)) == "QwenImagePipeline"
    export = here / "run/global_step_1/export"
    export.mkdir(parents=True)
    (export / "pytorch_lora_weights.safetensors").touch()
    OmegaConf.save(preflight(composed(*settings(here))), here / "run/config.yaml")
    assert find_weights(export.parent).model == find_weights(export.parent, "somebody/tiny").model == found.model


def test_a_miniature_of_a_model_on_the_hub(here, mirror, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(sys, "argv", ["verl-omni", "somebody/tiny", str(here / "small")])
    tiny.main()
    assert read_architecture(str(here / "small")) == "QwenImagePipeline"
    assert not any(name.endswith(".safetensors") for name in mirror.asked)
