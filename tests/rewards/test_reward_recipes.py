"""The OCR, GenEval and multi-reward recipes end to end, in miniature: real data, a real reward server, tiny models."""

import json
import sys
from pathlib import Path

import pytest
from e2e_runs import metrics
from hydra import compose, initialize_config_dir
from reward_servers import serving
from test_geneval_models import folders  # noqa: F401  (a fixture)
from tiny_models import tiny_checkpoint
from tiny_scorers import clip_folder

from verl_omni.cli import prepare_geneval, prepare_ocr, recipes
from verl_omni.config import schema
from verl_omni.rewards import make_scorer
from verl_omni.testing.local_trainer import local_trainer
from verl_omni.trainer.checks.preflight import preflight

SMALL = [
    "hydra.searchpath=[pkg://verl_omni.trainer.config]",
    *(f"actor_rollout_ref.rollout.pipeline.{name}" for name in ("height=64", "width=96", "num_inference_steps=4")),
    "actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.algo.sde_window_range=[0,3]",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.model.lora_rank=4",
    *("data.train_batch_size=2", "data.val_max_samples=6", "trainer.n_gpus_per_node=1", "trainer.device=cpu"),
    *("trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.save_freq=0"),
]
GENEVAL = [
    {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"},
    {"tag": "counting", "include": [{"class": "clock", "count": 2}], "exclude": [{"class": "clock", "count": 3}],
     "prompt": "a photo of two clocks"},
    {"tag": "position", "include": [{"class": "dog", "count": 1}, {"class": "tie", "count": 1, "position":
     ["right of", 0]}], "prompt": "a photo of a tie right of a dog"},
]  # fmt: skip
SIGNS = ['A bakery, its chalkboard reads "Fresh Bread"', 'Neon over a wet street: "Open 24 Hours"', 'A bus with "407"']


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Both data sets, as a user makes them."""
    (tmp_path / "geneval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GENEVAL))
    (tmp_path / "signs.txt").write_text("\n".join(SIGNS * 2))
    both = ["--train", f"{tmp_path}/geneval.jsonl", "--test", f"{tmp_path}/geneval.jsonl"]
    for module, arguments in (
        (prepare_geneval, [*both, "--output", f"{tmp_path}/geneval"]),
        (prepare_ocr, ["--input", f"{tmp_path}/signs.txt", "--output", f"{tmp_path}/ocr", "--holdout", "2"]),
    ):
        monkeypatch.setattr(sys, "argv", ["x", *arguments])
        module.main()
    return tmp_path


def run(recipe: str, data: Path, monkeypatch, address: str = "") -> dict[str, float]:
    """The metrics of the one step."""
    monkeypatch.setenv("MODEL_PATH", str(tiny_checkpoint()))
    monkeypatch.setenv("DATA_DIR", str(data))
    monkeypatch.setenv("REWARD_ADDRESS", address)
    monkeypatch.chdir(data)
    schema.register()
    with initialize_config_dir(str(recipes.FOLDER), version_base=None):
        config = preflight(compose(recipe, [*SMALL, f"trainer.default_local_dir={data}/run"]))
    local_trainer(config).fit()
    return metrics(data / "run")[1]


def test_ocr(data, monkeypatch, process_group):
    step = run("qwen_image_ocr_lora", data / "ocr", monkeypatch)
    assert 0 <= step["reward/ocr/mean"] <= 1 and step["reward/failed"] == 0
    assert "val-core/ocr/reward/mean@1" in step


def test_geneval(data, monkeypatch, process_group, folders):  # noqa: F811
    models = {"detector": str(folders["dino"]), "classifier": str(folders["clip"])}
    with serving({"geneval": make_scorer("geneval", models)}) as server:
        step = run("qwen_image_geneval_lora", data / "geneval", monkeypatch, server.address)
    assert step["reward/geneval/mean"] in (0.0, 0.25, 0.5, 0.75, 1.0) and step["reward/failed"] == 0
    tasks = {
        name
        for name in step
        if name.startswith("val-aux/geneval/") and not name.endswith(("correct/mean@1", "geneval/mean@1"))
    }
    tags = ("single_object", "counting", "position", "mean_of_tags")
    assert tasks == {f"val-aux/geneval/{tag}/mean@1" for tag in tags}


def test_two_rewards(data, monkeypatch, process_group, tmp_path):
    clip = tmp_path / "clip"
    clip_folder(clip)
    models = {"model": str(clip), "processor": str(clip)}
    with serving({"pickscore": make_scorer("pickscore", models)}) as server:
        step = run("qwen_image_multi_reward_lora", data / "ocr", monkeypatch, server.address)
    assert {"reward/ocr/mean", "reward/pickscore/mean", "val-aux/ocr/pickscore/mean@1"} <= step.keys()
    # A tiny model writes nothing that can be read: the gate is closed, and what lies behind it is seen all the same.
    assert step["reward/ocr/max"] < 0.5 and step["reward/pickscore/max"] == 0.0
    assert step["val-aux/ocr/pickscore/score/mean@1"] != 0.0
