"""Samples drawn by servers with their own copy of the model, to which weights are pushed."""

import json
import os
import subprocess
import sys

import pytest
from e2e_runs import LEARNING, ROOT, metrics, run_here, settings, users_environment

# The score of `uninterrupted`, without the rest of its module.
BRIGHTNESS = """
def compute_score(image):
    pixels = image.convert("L").getdata()
    return sum(pixels) / len(pixels) / 255
"""
pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy


def test_a_rollout_server_without_staleness_changes_no_number(tmp_path, monkeypatch, uninterrupted):
    """In one process, of a run that had processes of its own."""
    (tmp_path / "brightness.py").write_text(BRIGHTNESS)
    learning = [one for one in LEARNING if "killer" not in one]
    ahead = ("trainer.mode=one_step_off", "trainer.max_staleness=0")
    own = "reward.custom_reward_function.path=brightness.py"
    run_here(settings("run", *learning, *ahead, own), tmp_path, monkeypatch)
    found = metrics(tmp_path / "run")
    for step in (1, 2, 3):
        own = ("staleness/mean", "staleness/max", "rollout/server_restarts")
        assert [found[step].pop(name) for name in own] == [0, 0, 0]
    assert found == metrics(uninterrupted)


def test_the_documented_one_step_off_script_with_a_correction(tmp_path):
    """It looks for the staleness itself. The run's folder is kept, to look at the weights of its samples."""
    script = ROOT / "tests/special_e2e/run_one_step_off_policy.sh"
    more = [
        "algorithm.rollout_correction.rollout_is=step",
        "actor_rollout_ref.actor.optim.lr=0.003",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
    ]
    kept = tmp_path / "metrics.jsonl"
    environment = users_environment() | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "KEEP_METRICS": str(kept)}
    done = subprocess.run(
        ["bash", script, *more], cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "OK: three steps" in done.stdout
    found = [json.loads(line)["data"] for line in kept.read_text().splitlines()]
    steps = [line for line in found if "actor/grad_norm" in line]
    assert [line["staleness/max"] for line in steps] == [0, 1, 1]
    assert all(line["actor/old_log_probs_from_recompute"] == 1 for line in steps)
    # The weights that drew the first samples are those that learn from them; later ones have moved on.
    assert steps[0]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-5)
    assert steps[0]["rollout_corr/k3_kl"] < 1e-9 < steps[1]["rollout_corr/k3_kl"]
    assert steps[0]["actor/rollout_ratio_max_dev"] < 1e-5 < steps[1]["actor/rollout_ratio_max_dev"]
