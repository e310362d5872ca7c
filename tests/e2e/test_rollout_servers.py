"""Samples drawn by servers with their own copy of the model, to which weights are pushed."""

import base64
import io
import json
import os
import shlex
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import requests
import warm
from e2e_runs import LEARNING, ROOT, metrics, prompts, run_here, settings, users_environment
from PIL import Image

from verl_omni.data.prompt_dataset import user_text
from verl_omni.testing.local_trainer import local_config, local_trainer
from verl_omni.utils.background import wait_for

HTTP = "actor_rollout_ref.rollout.http"
# A score that needs nothing else of its module.
BRIGHTNESS = """
def compute_score(image):
    pixels = image.convert("L").getdata()
    return sum(pixels) / len(pixels) / 255
"""
pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy


def test_a_rollout_server_without_staleness_changes_no_number(tmp_path, monkeypatch):
    """Both runs in one process: what was computed in it before may move the last bits of both."""
    (tmp_path / "brightness.py").write_text(BRIGHTNESS)
    learning = [one for one in LEARNING if "killer" not in one]
    ahead = ("trainer.mode=one_step_off", "trainer.max_staleness=0")
    own = "reward.custom_reward_function.path=brightness.py"
    run_here(settings("colocated", *learning, own), tmp_path, monkeypatch)
    run_here(settings("run", *learning, *ahead, own), tmp_path, monkeypatch)
    found = metrics(tmp_path / "run")
    for step in (1, 2, 3):
        own = ("staleness/mean", "staleness/max", "rollout/server_restarts")
        assert [found[step].pop(name) for name in own] == [0, 0, 0]
    assert found == metrics(tmp_path / "colocated")


def test_people_look_at_the_policy_and_no_number_changes(tmp_path, monkeypatch, capsys):
    """Somebody asks all the time, in one process. What validation has drawn last is drawn once more over HTTP."""
    (tmp_path / "brightness.py").write_text(BRIGHTNESS)
    monkeypatch.chdir(tmp_path)
    own = [one for one in LEARNING if "killer" not in one] + ["reward.custom_reward_function.path=brightness.py"]
    run_here(settings("alone", *own, "trainer.mode=separate"), tmp_path, monkeypatch)
    capsys.readouterr()

    trainer = local_trainer(local_config(settings("run", *own, "trainer.mode=separate", f"{HTTP}.port=0")))
    address = capsys.readouterr().out.removeprefix("Look at the policy while it trains: ").strip()
    over, answers = threading.Event(), []

    def look_on() -> None:
        while not over.is_set():
            answers.append(requests.post(f"{address}/v1/images/generations", json={"prompt": "a cat"}, timeout=60))
            time.sleep(0.05)

    looking = threading.Thread(target=look_on)
    looking.start()
    try:
        trainer.fit()
    finally:
        over.set()
        looking.join()
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert {answer.json()["version"] for answer in answers if answer.ok} == {0, 1, 2, 3}
    assert metrics(tmp_path / "run") == metrics(tmp_path / "alone")

    for i, row in enumerate(pq.read_table(prompts() / "test.parquet").to_pylist()):
        asked = {"prompt": user_text(row["prompt"]), "seed": 42 + i}
        answer = requests.post(f"{address}/v1/images/generations", json=asked, timeout=60).json()
        found = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))))
        last = np.asarray(Image.open(tmp_path / f"run/validation/step_3/{i:05d}.png"))
        first = np.asarray(Image.open(tmp_path / f"run/validation/step_0/{i:05d}.png"))
        assert answer["version"] == 3
        assert np.abs(found.astype(int) - last).max() <= 1 < np.abs(found.astype(int) - first).max()
    wait_for(trainer.rollouts.servers[0].stop.remote())


def test_the_documented_one_step_off_script_with_a_correction(tmp_path):
    """It looks for the staleness itself. The run's folder is kept, to look at the weights of its samples."""
    script = ROOT / "tests/special_e2e/run_one_step_off_policy.sh"
    more = [
        "algorithm.rollout_correction.rollout_is=step",
        "actor_rollout_ref.actor.optim.lr=0.003",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
    ]
    kept = tmp_path / "metrics.jsonl"
    python = tmp_path / "python"
    forking = warm.python() if warm.WORKS else [sys.executable]
    python.write_text(f'#!/bin/sh\nexec {shlex.join(forking)} "$@"\n')
    python.chmod(0o755)
    environment = users_environment() | {"PYTHON": str(python), "PYTHONPATH": str(ROOT), "KEEP_METRICS": str(kept)}
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
