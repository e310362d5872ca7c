"""Runs that find their micro-batch: those of the same number said, and go on with it after a resume."""

import re
import shutil

import pytest
from e2e_runs import metrics, run_here, settings

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
GRPO = [
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.rollout.pipeline.true_cfg_scale=2.0",
    "actor_rollout_ref.rollout.algo.sde_window_size=2",
]
DPO = ["actor_rollout_ref.model.algorithm=dpo", "algorithm.timesteps_per_sample=2"]
CASES = {"flow_grpo": (GRPO, 1), "dpo": (DPO, 2)}


@pytest.mark.parametrize("algorithm", CASES)
def test_a_run_is_that_of_the_number_it_found_and_goes_on_with_it(algorithm, tmp_path, monkeypatch, capfd):
    given, unit = CASES[algorithm]
    small = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.01", "trainer.save_freq=1"]
    run_dir = tmp_path / "auto"

    def run(folder, rows) -> str:
        more = ["trainer.total_training_steps=2", "data.val_files=null", f"{MICRO_BATCH}={rows}"]
        run_here(settings(folder, *given, *small, *more), tmp_path, monkeypatch)
        out, err = capfd.readouterr()
        return out + err

    said = run(run_dir, "auto")
    (found,) = re.findall(r"Micro-batch: (\d+) \(rows/s of those tried: ", said)
    assert int(found) % unit == 0 and f"tried: {unit}: " in said and f"{2 * unit}: " in said
    straight = metrics(run_dir)

    assert "Micro-batch" not in run(tmp_path / "said", found)
    said_so = metrics(tmp_path / "said")
    for step in (1, 2):
        assert straight[step].keys() == said_so[step].keys()
        for name, value in said_so[step].items():
            assert straight[step][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name

    shutil.rmtree(run_dir / "global_step_2")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("1")
    assert f"Micro-batch: {found} (found before the checkpoint)." in run(run_dir, "auto")
    assert metrics(run_dir) == straight
