"""Whole runs with extensions that were written by the public guides."""

import shutil
from pathlib import Path

import pytest
from e2e_runs import QuickRun, metrics, run_here, settings

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

HERE = Path(__file__).parent
SHORT = ["trainer.total_training_steps=1", "data.val_files=null"]


def test_a_launcher_with_an_estimator_a_loss_an_adapter_and_a_step_of_its_own(tmp_path):
    """The launcher lies in another folder than it is started in, and names no module to the workers."""
    (tmp_path / "mine").mkdir()
    for name in ("launcher.py", "my_algo.py"):
        shutil.copy(HERE / name, tmp_path / "mine")
    flags = [
        "actor_rollout_ref.model.algorithm=my_algo",
        "actor_rollout_ref.rollout.algo.sde_type=my_sde",
        "actor_rollout_ref.rollout.algo.noise_level=0.6",
        "actor_rollout_ref.rollout.pipeline.true_cfg_scale=2.0",
    ]
    QuickRun(settings("run", *flags, *SHORT), tmp_path, program=["mine/launcher.py"]).succeed()
    found = metrics(tmp_path / "run")[1]
    assert found["actor/grad_norm"] > 0 and found["actor/first_ratio_max_dev"] < 1e-4
    assert {"actor/ppo_kl", "actor/ratio_max_dev"} <= found.keys()
    assert not any(name.startswith("actor/actor/") for name in found)
    # One image of each group of four has 1, the others -1: the guide's estimator, not Flow-GRPO's.
    assert found["critic/advantages/mean"] == -0.5 and found["critic/advantages/max"] == 1
    written = (tmp_path / "run/config.yaml").read_text()
    assert "sde_type: my_sde" in written and "- my_algo" in written


def test_only_an_adapter_and_the_cascaded_fields_pinned(tmp_path, monkeypatch, process_group):
    flags = [
        "actor_rollout_ref.model.external_lib=my_mix",
        "algorithm.adv_estimator=flow_grpo",
        "actor_rollout_ref.model.algorithm=my_mix",
        "actor_rollout_ref.actor.diffusion_loss.loss_mode=flow_grpo",
    ]
    run_here(settings("run", *flags, *SHORT), tmp_path, monkeypatch)
    assert metrics(tmp_path / "run")[1]["actor/grad_norm"] > 0
