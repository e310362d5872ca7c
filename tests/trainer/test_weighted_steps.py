"""Losses whose pairs count by their step, in whole runs: one that goes on has the numbers of one that did not stop."""

import shutil

import pytest
from e2e_runs import metrics, run_here, settings

WEIGHTS = {"tempflow_grpo": [], "flash_grpo": ["actor_rollout_ref.rollout.algo.sde_type=cps"]}


@pytest.mark.parametrize("algorithm", WEIGHTS)
def test_a_run_goes_on_bit_for_bit(tmp_path, monkeypatch, process_group, algorithm):
    arguments = settings(
        tmp_path / "run", f"actor_rollout_ref.model.algorithm={algorithm}", "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.optim.lr=0.01", "data.val_files=null", "trainer.save_freq=1",
        "trainer.total_training_steps=2", *WEIGHTS[algorithm],
    )  # fmt: skip
    run_here(arguments, tmp_path, monkeypatch)
    told = metrics(tmp_path / "run")
    assert told[1]["actor/first_ratio_max_dev"] < 1e-5 and told[1]["actor/step_weight"] > 0
    assert told[2]["actor/step_weight"] != told[1]["actor/step_weight"] or algorithm == "tempflow_grpo", "other steps"
    shutil.rmtree(tmp_path / "run/global_step_2")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("1")
    run_here(arguments, tmp_path, monkeypatch)
    assert metrics(tmp_path / "run") == told
