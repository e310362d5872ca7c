"""Kill -9 in the middle of a step and of a save, and start again: bit for bit the metrics of an uninterrupted run."""

import json
import os
import signal
import time

import pytest
import torch
from e2e_runs import LEARNING, LIMIT, Run, metrics, settings, user_folder
from PIL import Image
from safetensors.torch import load_file

from verl_omni.report.starts import read_starts

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

SCORES_A_STEP, SCORES_OF_VALIDATION = 8, 2


def killed(folder, moment: str) -> str:
    """Start (again), and die at that moment."""
    (folder / "kill").write_text(moment)
    run = Run(settings("run", *LEARNING), folder)
    (folder / "driver").write_text(str(run.process.pid))
    assert run.wait() == -signal.SIGKILL, run.output()[-3000:]
    assert not (folder / "kill").exists()
    assert_nobody_left(folder)
    return run.output()


def assert_nobody_left(folder) -> None:
    """Ray and all workers of a killed driver end by themselves."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if not any(str(folder) in environment for environment in environments()):
            return
        time.sleep(0.2)
    raise AssertionError("processes of the killed run are still there")


def environments():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield open(f"/proc/{pid}/environ").read()
        except OSError:
            continue


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Killed in the second step's rewards, then in the second step's save, then left to finish."""
    folder = user_folder(tmp_path_factory.mktemp("killed"))
    killed(folder, f"score {SCORES_OF_VALIDATION + SCORES_A_STEP + 3}")
    run_dir = folder / "run"
    assert sorted(p.name for p in run_dir.glob("global_step_*")) == ["global_step_1"]
    assert list(metrics(run_dir)) == [0, 1]
    output = killed(folder, "save of .writing_global_step_2")
    assert "Resuming from run/global_step_1: step 1 of 3 is done." in output
    assert (run_dir / ".writing_global_step_2").is_dir() and not (run_dir / "global_step_2").exists()
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == "1"
    with (run_dir / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "da')  # a line that was being written
    output = Run(settings("run", *LEARNING), folder).succeed()
    assert "Resuming from run/global_step_1" in output and "has ended without a word: taking over" in output
    return run_dir


def test_a_run_leaves_what_the_documentation_promises(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    assert names == {
        "config.yaml", "metrics.jsonl", "run.log", "validation", "latest_checkpointed_iteration.txt",
        "global_step_2", "global_step_3", "starts.jsonl", "report.html", "training",
    }  # fmt: skip
    said = "Done: all of the run is in run, weights in run/global_step_3/export, report in run/report.html"
    assert said in (uninterrupted.parent / "log.txt").read_text().splitlines()
    page = (uninterrupted / "report.html").read_text()
    assert "Before and after" in page and "critic/rewards/std_mean" in page and "killer.py" in page
    (start,) = read_starts(uninterrupted)
    assert start["step"] == 0 and "main_diffusion" in start["command"] and "lora_rank=4" in start["command"]
    assert (uninterrupted / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert sorted(p.name for p in (uninterrupted / "validation").iterdir()) == ["step_0", "step_2", "step_3"]
    rows = [json.loads(line) for line in (uninterrupted / "validation/step_3/samples.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1] and all(0 <= row["score"] <= 1 for row in rows)
    for row in rows:
        image = Image.open(uninterrupted / "validation/step_3" / row["image"])
        assert image.size == (32, 32)
        pixels = list(image.convert("L").getdata())
        assert sum(pixels) / len(pixels) / 255 == pytest.approx(row["score"], abs=1e-6)
    lora = load_file(uninterrupted / "global_step_3/export/pytorch_lora_weights.safetensors")
    assert all(torch.isfinite(w).all() for w in lora.values()) and any(w.abs().max() > 0 for w in lora.values())

    found = metrics(uninterrupted)
    assert list(found) == [0, 1, 2, 3]
    scores = [found[s]["val-core/jpeg_compressibility/reward/mean@1"] for s in (0, 2, 3)]
    assert len(set(scores)) == 3, "the trained model draws other pictures"
    for step in (1, 2, 3):
        assert found[step]["actor/first_ratio_max_dev"] <= 2e-6
        assert found[step]["actor/grad_norm"] > 0 and found[step]["training/global_step"] == step
    assert found[2]["actor/kl_loss"] > 0


def test_the_remaining_metrics_are_equal_bit_for_bit(uninterrupted, interrupted):
    expected, got = metrics(uninterrupted), metrics(interrupted)
    assert list(got) == [0, 1, 2, 3]
    for step in expected:
        assert expected[step] == got[step], step


def test_the_weights_and_images_are_equal_bit_for_bit(uninterrupted, interrupted):
    name = "global_step_3/export/pytorch_lora_weights.safetensors"
    one, other = load_file(uninterrupted / name), load_file(interrupted / name)
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    for path in (uninterrupted / "validation").rglob("*.png"):
        twin = interrupted / path.relative_to(uninterrupted)
        assert path.read_bytes() == twin.read_bytes()


def test_a_finished_run_is_said_to_be_finished_and_stays_as_it_is(interrupted):
    before = {path: path.stat().st_mtime_ns for path in interrupted.rglob("*")}
    output = Run(settings("run", *LEARNING), interrupted.parent).succeed()
    assert "The run in run is finished: all 3 steps are done" in output
    assert {path: path.stat().st_mtime_ns for path in interrupted.rglob("*")} == before


def test_nothing_of_the_broken_saves_is_left(interrupted):
    names = sorted(p.name for p in interrupted.iterdir() if "global_step" in p.name)
    assert names == ["global_step_2", "global_step_3"]
    assert (interrupted / "latest_checkpointed_iteration.txt").read_text() == "3"
