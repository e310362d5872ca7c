"""The shell scripts that a user starts: clear errors, and recipes that the configuration accepts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from tiny_models import tiny_adapter, tiny_checkpoint

from verl_omni.cli import recipes
from verl_omni.config import schema
from verl_omni.trainer.checks.preflight import preflight

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
RECIPES = {
    "flowgrpo_trainer/run_qwen_image_ocr.sh": ("qwen_image_ocr", "flow_grpo", 0),
    "flowgrpo_trainer/run_qwen_image_ocr_lora.sh": ("qwen_image_ocr_lora", "flow_grpo", 32),
    "flowgrpo_trainer/run_qwen_image_ocr_lora_fast.sh": ("qwen_image_ocr_lora_fast", "flow_grpo", 32),
    "mixgrpo_trainer/run_qwen_image_ocr_lora_mixgrpo.sh": ("qwen_image_ocr_lora_mixgrpo", "mix_grpo", 32),
    "dancegrpo_trainer/run_qwen_image_ocr_lora_dancegrpo.sh": ("qwen_image_ocr_lora_dancegrpo", "dance_grpo", 32),
    "grpoguard_trainer/run_qwen_image_ocr_lora_grpoguard.sh": ("qwen_image_ocr_lora_grpoguard", "grpo_guard", 32),
    "flowdppo_trainer/run_qwen_image_ocr_lora_flowdppo.sh": ("qwen_image_ocr_lora_flowdppo", "flow_dppo", 32),
    "tempflow_trainer/run_qwen_image_ocr_lora_tempflow.sh": ("qwen_image_ocr_lora_tempflow", "tempflow_grpo", 32),
    "flash_trainer/run_qwen_image_ocr_lora_flash.sh": ("qwen_image_ocr_lora_flash", "flash_grpo", 32),
    "diffusion_nft_trainer/run_qwen_image_ocr_lora_nft.sh": ("qwen_image_ocr_lora_nft", "diffusion_nft", 32),
    "opd_trainer/run_qwen_image_ocr_lora_opd.sh": ("qwen_image_ocr_lora_opd", "opd", 32),
    "draft_trainer/run_qwen_image_aesthetic_lora_draft.sh": ("qwen_image_aesthetic_lora_draft", "draft", 32),
    "opd_trainer/run_qwen_image_ocr_lora_opd_forward.sh": ("qwen_image_ocr_lora_opd_forward", "opd_forward", 32),
    "dgpo_trainer/run_qwen_image_ocr_lora_dgpo.sh": ("qwen_image_ocr_lora_dgpo", "dgpo", 32),
    "crd_trainer/run_qwen_image_ocr_lora_crd.sh": ("qwen_image_ocr_lora_crd", "crd", 32),
    "awm_trainer/run_qwen_image_ocr_lora_awm.sh": ("qwen_image_ocr_lora_awm", "awm", 32),
    "dpo_trainer/run_qwen_image_ocr_lora_dpo.sh": ("qwen_image_ocr_lora_dpo", "dpo", 32),
}


def bash(script: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k not in ("MODEL_PATH", "DATA_DIR", "NUM_GPUS")}
    return subprocess.run(
        ["bash", str(script), *arguments], env=clean | {"PYTHON": sys.executable} | env, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ocr")
    rows = [
        {"data_source": "ocr", "prompt": f'a sign "{i}"', "reward_model": {"style": "rule", "ground_truth": str(i)}}
        for i in range(40)
    ]
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder


@pytest.mark.parametrize("script", RECIPES)
def test_what_is_not_set_is_said(script):
    missing = bash(EXAMPLES / script)
    assert missing.returncode != 0 and "set MODEL_PATH to the diffusers folder of Qwen-Image" in missing.stderr
    missing = bash(EXAMPLES / script, MODEL_PATH="/models")
    assert missing.returncode != 0 and "set DATA_DIR to the folder with train.parquet" in missing.stderr


@pytest.mark.parametrize("script", RECIPES)
def test_recipes_pass_every_check(script, data, monkeypatch, tmp_path):
    name, algorithm, rank = RECIPES[script]
    monkeypatch.setenv("MODEL_PATH", str(tiny_checkpoint()))
    monkeypatch.setenv("DATA_DIR", str(data))
    teacher = tiny_adapter(tmp_path / "teacher", rank) if algorithm.startswith("opd") else tmp_path
    monkeypatch.setenv("TEACHER", str(teacher))
    schema.register()
    with initialize_config_dir(str(recipes.FOLDER), version_base=None):
        search = "hydra.searchpath=[pkg://verl_omni.trainer.config]"
        config = preflight(compose(name, [search, f"trainer.default_local_dir={tmp_path}"]))
    assert (config.actor_rollout_ref.model.algorithm, config.actor_rollout_ref.model.lora_rank) == (algorithm, rank)
    assert config.trainer.n_gpus_per_node == 8


def test_every_policy_gradient_and_preference_algorithm_has_an_example():
    # in a process of its own: other tests register names here
    code = "from verl_omni.algorithms.registry import algorithm_names; print(*algorithm_names())"
    known = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    estimator_only = {"gdpo"}  # a setting of any of the others
    assert {algorithm for _, algorithm, _ in RECIPES.values()} == set(known) - estimator_only


def test_every_script_starts_a_shipped_recipe():
    scripts = EXAMPLES.glob("*_trainer/*.sh")  # others are told what to start
    started = {path: re.findall(r"-m verl_omni[\w.]+ (\w+)", path.read_text()) for path in scripts}
    assert {name for found in started.values() for name in found} <= set(recipes.shipped())
    assert all(len(found) == 1 for found in started.values()), started


def test_a_recipe_is_shown_with_how_to_start_it_and_how_to_see_whether_it_fits(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl-omni recipes", "show", "qwen_image_ocr_lora_opd"])
    recipes.main()
    *_, start, fits = capsys.readouterr().out.splitlines()
    needed = "DATA_DIR=... MODEL_PATH=... TEACHER=... verl-omni"
    assert start == f"# Start it: {needed} train qwen_image_ocr_lora_opd [key=value ...]"
    assert fits == f"# Whether it fits: {needed} plan qwen_image_ocr_lora_opd --gpus 8 --memory 80 --gpu h100"


def test_a_recipe_takes_further_settings(data):
    script = EXAMPLES / "flowgrpo_trainer/run_qwen_image_ocr_lora.sh"
    env = {"MODEL_PATH": str(tiny_checkpoint()), "DATA_DIR": str(data), "NUM_GPUS": "2"}
    done = bash(script, "--cfg", "job", "--resolve", "trainer.save_freq=7", **env)
    assert done.returncode == 0, done.stderr
    assert "  save_freq: 7\n" in done.stdout and "  n_gpus_per_node: 2\n" in done.stdout
    assert f"path: {tiny_checkpoint()}" in done.stdout and "lora_rank: 32" in done.stdout
    wrong = bash(script, "trainer.sav_freq=7", **env)
    assert wrong.returncode != 0 and "trainer.save_freq" in wrong.stderr


def test_an_unknown_smoke_test_is_refused():
    done = bash(ROOT / "tests/gpu_smoke/run_gpu_smoke_tests.sh", "9")
    assert done.returncode == 1 and "there is no test 9" in done.stderr
