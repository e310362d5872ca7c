"""The direct-preference recipes: the configuration accepts them, and their scripts say what is not set."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from PIL import Image
from test_offline_pairs import write_jsonl
from tiny_models import tiny_checkpoint

from verl_omni.config import schema
from verl_omni.data.prepare_offline_dpo import prepare
from verl_omni.trainer.checks.preflight import preflight

EXAMPLES, RECIPES = (Path(__file__).parents[2] / name for name in ("examples", "verl_omni/recipes"))
ONLINE = {
    "diffusion_nft_trainer/qwen_image_ocr_lora_nft": "diffusion_nft",
    "awm_trainer/qwen_image_ocr_lora_awm": "awm",
    "dgpo_trainer/qwen_image_ocr_lora_dgpo": "dgpo",
    "crd_trainer/qwen_image_ocr_lora_crd": "crd",
    "dpo_trainer/qwen_image_ocr_lora_dpo": "dpo",
    "draft_trainer/qwen_image_aesthetic_lora_draft": "draft",
}
OFFLINE = "dpo_trainer/qwen_image_lora_offline_dpo"


def checked(recipe: str, *overrides: str):
    schema.register()
    with initialize_config_dir(str(RECIPES), version_base=None):
        search = "hydra.searchpath=[pkg://verl_omni.trainer.config]"
        return preflight(compose(Path(recipe).name, [search, *overrides]))


@pytest.mark.parametrize("recipe", ONLINE)
def test_online_recipes_pass_every_check(recipe, monkeypatch, tmp_path):
    rows = [
        {"data_source": "ocr", "prompt": f'a sign "{i}"', "reward_model": {"style": "rule", "ground_truth": str(i)}}
        for i in range(40)
    ]
    for name in ("train", "test"):
        pd.DataFrame(rows).to_parquet(tmp_path / f"{name}.parquet")
    monkeypatch.setenv("MODEL_PATH", str(tiny_checkpoint()))
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    config = checked(recipe, f"trainer.default_local_dir={tmp_path}")
    assert config.actor_rollout_ref.model.algorithm == ONLINE[recipe]
    assert config.algorithm.trainer_type == "direct_preference" and config.trainer.n_gpus_per_node == 8


def test_the_offline_recipe_trains_on_a_cache_of_its_size(monkeypatch, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 512, 512, 3), dtype=np.uint8)
    for name, image in zip(("good", "bad"), pixels, strict=True):
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    write_jsonl(tmp_path, [{"prompt": "a cat", "chosen": "good.png", "rejected": "bad.png"}])
    cache = prepare(tiny_checkpoint(), tmp_path, tmp_path / "cache", height=512, width=512, device="cpu")
    monkeypatch.setenv("MODEL_PATH", str(tiny_checkpoint()))
    monkeypatch.setenv("CACHE_DIR", str(cache))
    with pytest.raises(ValueError, match="data.train_batch_size=64 is more than the 1"):
        checked(OFFLINE)
    small = ("data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    assert checked(OFFLINE, *small).algorithm.paired_preference
    with pytest.raises(ValueError, match="latents of 512 x 512 images"):
        checked(OFFLINE, *small, "actor_rollout_ref.rollout.pipeline.height=256")


@pytest.mark.parametrize("recipe", [*ONLINE, OFFLINE])
def test_scripts_say_what_is_not_set(recipe):
    folder, name = recipe.split("/")
    clean = {k: v for k, v in os.environ.items() if k not in ("MODEL_PATH", "DATA_DIR", "PAIRS", "CACHE_DIR")}
    given: dict[str, str] = {}
    for variable in ("MODEL_PATH", "PAIRS", "CACHE_DIR") if recipe == OFFLINE else ("MODEL_PATH", "DATA_DIR"):
        done = subprocess.run(
            ["bash", str(EXAMPLES / folder / f"run_{name}.sh")],
            env=clean | given | {"PYTHON": sys.executable},
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0 and f"set {variable} to" in done.stderr
        given[variable] = "/nowhere"
