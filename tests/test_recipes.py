"""The shipped recipes: settings that others have published, every check, and a step of those that nobody has."""

import re
from pathlib import Path

import pytest
from recipe_inputs import TINY, composed_recipe

from benchmarks.plan_recipes import OFFLINE
from benchmarks.recipe_models import kind_of
from verl_omni.cli import recipes
from verl_omni.testing.local_trainer import local_trainer
from verl_omni.trainer.checks.preflight import preflight

ROOT = Path(__file__).parents[1]
SCRIPTS = "".join(path.read_text() for path in (ROOT / "examples").glob("*/*.sh"))
WITHOUT_SCRIPT = [name for name in recipes.shipped() if not re.search(rf"\b{name}\b", SCRIPTS)]
OURS = [name for name, path in recipes.shipped().items() if "tried only in miniature" in path.read_text()]

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
PUBLISHED = {  # as github.com/yifan123/flow_grpo's config files and those of the others compute them
    "images a prompt": lambda c: c.actor_rollout_ref.rollout.n,
    "prompts": lambda c: c.data.train_batch_size,
    "updates": lambda c: c.data.train_batch_size // c.actor_rollout_ref.actor.ppo_mini_batch_size,
    "steps": lambda c: c.actor_rollout_ref.rollout.pipeline.num_inference_steps,
    "guidance": lambda c: c.actor_rollout_ref.rollout.pipeline.guidance_scale,
    "noise": lambda c: c.actor_rollout_ref.rollout.algo.noise_level,
    "clip": lambda c: c.actor_rollout_ref.actor.diffusion_loss.clip_ratio,
    "kl": lambda c: c.actor_rollout_ref.actor.use_kl_loss and c.actor_rollout_ref.actor.kl_loss_coef,
    "lr": lambda c: c.actor_rollout_ref.actor.optim.lr,
    "rank": lambda c: c.actor_rollout_ref.model.lora_rank,
}
VALUES = {
    # train_batch_size * num_batches_per_epoch * gpus / num_image_per_prompt prompts: 9 * 4 * 32 / 24, ...
    "sd35m_ocr_lora": (24, 48, 2, 10, 4.5, 0.7, 1e-4, 0.04, 3e-4, 32),
    "sd35m_geneval_lora": (24, 48, 2, 10, 4.5, 0.7, 1e-4, 0.04, 3e-4, 32),
    "sd35m_pickscore_lora_fast": (18, 64, 2, 10, 1.0, 0.8, 1e-5, False, 3e-4, 32),
    "sd35m_ocr_lora_grpoguard": (24, 48, 2, 10, 4.5, 0.7, 2e-6, False, 1e-4, 32),
    "sd35m_ocr_lora_nft": (24, 48, 2, 10, 1.0, None, None, False, 3e-4, 32),
    "sd35m_ocr_lora_awm": (24, 72, 1, 14, 1.0, None, 1.0, False, 3e-4, 32),
    "sd35m_ocr_lora_dgpo": (16, 8, 1, 10, 4.5, None, 1e-2, False, 3e-4, 64),
    "flux_dev_pickscore_lora": (24, 48, 2, 6, 3.5, 0.9, 1e-4, False, 3e-4, 64),
    "flux_dev_hpsv2_dancegrpo": (12, 16, 2, 16, 3.5, 0.3, 1e-4, False, 1e-5, 0),
    "wan_1_3b_ocr_lora": (4, 32, 2, 20, 4.5, 0.7, 1e-3, 0.004, 1e-4, 32),
}

SMALL = [
    "actor_rollout_ref.model.lora_rank=4", "data.train_batch_size=2", f"{ROLLOUT}.n=4", f"{ROLLOUT}.max_num_seqs=4",
    f"{ROLLOUT}.pipeline.num_inference_steps=3", f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", "trainer.total_training_steps=1", "trainer.n_gpus_per_node=1",
    "trainer.device=cpu", "trainer.val_before_train=false", "trainer.test_freq=0", "trainer.save_freq=0",
    "data.val_files=null", "data.val_max_samples=-1", "reward.num_workers=1",
]  # fmt: skip
PICTURE = [f"{ROLLOUT}.pipeline.height=64", f"{ROLLOUT}.pipeline.width=96"]
VIDEO = [f"{ROLLOUT}.pipeline.height=32", f"{ROLLOUT}.pipeline.width=32"]
WINDOW = [f"{ROLLOUT}.algo.sde_window_range=[0,2]"]
# What a recipe needs beside, and no server or weights: a coin in place of the reward, but where none is needed
COIN = "import random\n\n\ndef compute_score(prompt):\n    return float(random.random() < 0.5)\n"
WITH_A_COIN = ["reward.scorers=null", "reward.custom_reward_function.path=coin.py"]
SMALLER = {
    "flux_kontext_judge_lora": [*PICTURE, *WITH_A_COIN],
    "longcat_clap": [
        "actor_rollout_ref.model.lora_rank=0",
        f"{ROLLOUT}.pipeline.audio_duration_s=0.02", *WINDOW, *WITH_A_COIN,
    ],
    "ltx2_sync_lora": [*VIDEO, *WINDOW, f"{ROLLOUT}.pipeline.num_frames=9"],
    "qwen_image_geneval_lora_rewriter": [
        *PICTURE, *WINDOW, *WITH_A_COIN, "actor_rollout_ref.rewriter.max_new_tokens=8",
    ],
    "sd35m_geneval_lora_filtered": [*PICTURE, *WITH_A_COIN],
    "sd35m_ocr_lora_nft_pool": [
        *PICTURE, *WITH_A_COIN, f"{ROLLOUT}.pool.size=6", f"{ROLLOUT}.pool.num_inference_steps=2",
        "algorithm.timesteps_per_sample=2",
    ],
    "wan_ti2v_5b_first_frame_lora": [
        *VIDEO, *WINDOW, "reward.scorers=[{name: temporal_consistency}, {name: motion}]",
        f"{ROLLOUT}.pipeline.num_frames=5",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_SCRIPT)
def test_it_passes_every_check(name, monkeypatch, tmp_path):
    """Those that a script starts have theirs in test_scripts.py."""
    config = preflight(composed_recipe(name, monkeypatch, f"trainer.default_local_dir={tmp_path}"))
    assert config.trainer.n_gpus_per_node == 8 and config.trainer.experiment_name == name


@pytest.mark.parametrize("name", VALUES)
def test_settings_are_those_that_are_published(name, monkeypatch):
    config = composed_recipe(name, monkeypatch)
    assert {what: said(config) for what, said in PUBLISHED.items()} == dict(zip(PUBLISHED, VALUES[name], strict=True))


def test_the_noise_of_qwen_image_is_its_authors(monkeypatch):
    """pickscore_qwenimage of flow_grpo's config/grpo.py: noise_level, sde_window_size and sde_window_range."""
    algo = composed_recipe("qwen_image_ocr_lora", monkeypatch).actor_rollout_ref.rollout.algo
    assert (algo.noise_level, algo.sde_window_size, algo.sde_window_range) == (1.2, 2, [0, 5])


@pytest.mark.parametrize("name", recipes.shipped())
def test_it_says_where_its_settings_are_from_and_what_it_needs(name):
    head = recipes.shipped()[name].read_text().partition("defaults:")[0]
    (source,) = re.findall(r"^# Source: (.*)", head, re.MULTILINE)
    assert any(told in source for told in ("arXiv", "github.com", "docs/algorithms.md", "our own choice"))
    (need,) = re.findall(r"^# Needs: (.*)", head, re.MULTILINE)
    assert "GPUs of 80 GB" in need and TINY[kind_of(name)][1] in need


def test_the_plan_has_all_of_them():
    table = (ROOT / "docs/plan.md").read_text().split("<!-- RECIPES -->")[1].split("<!-- /RECIPES -->")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [name for name in recipes.shipped() if name != OFFLINE]


def test_those_that_are_our_own_choice_are_tried():
    assert set(OURS) == set(SMALLER)


@pytest.mark.parametrize("name", SMALLER)
def test_a_step_in_miniature(name, monkeypatch, tmp_path, process_group):
    (tmp_path / "coin.py").write_text(COIN)
    monkeypatch.chdir(tmp_path)
    config = composed_recipe(name, monkeypatch, *SMALL, *SMALLER[name], f"trainer.default_local_dir={tmp_path}/run")
    local_trainer(preflight(config)).fit()
    lines = (tmp_path / "run/metrics.jsonl").read_text()
    assert '"actor/grad_norm"' in lines
