"""Stopped by Ctrl-C, killed in a step, killed in a save, and started again: bit for bit an uninterrupted run.

Two of them have Ray and its processes: the one that is not interrupted, and the one that gets the signal.
"""

import contextlib
import io
import json
import signal
import time

import pytest
import torch
from e2e_runs import (
    LEARNING,
    LIMIT,
    SCORES_A_STEP,
    SCORES_OF_VALIDATION,
    QuickRun,
    assert_nobody_left,
    command_here,
    metrics,
    run_here,
    run_in_a_fork,
    settings,
    user_folder,
)
from PIL import Image
from ranks import ready_to_fork
from safetensors.torch import load_file

from verl_omni.report.starts import read_starts

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

LORA = "export/pytorch_lora_weights.safetensors"
# Nobody asks for a checkpoint of a step: a signal leaves one, until the run is over.
SETTINGS = settings("run", *LEARNING, "trainer.save_freq=-1")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """(folder, exit code, output) of a run that gets a Ctrl-C in the middle of its second step."""
    folder = user_folder(tmp_path_factory.mktemp("stopped"))
    # The step's first score waits until the signal is on its way.
    (folder / "hold").write_text(str(SCORES_OF_VALIDATION + SCORES_A_STEP + 1))
    run = QuickRun(SETTINGS, folder)
    run.wait_for(folder / "held")
    run.process.send_signal(signal.SIGINT)
    time.sleep(1)
    (folder / "go on").touch()
    code = run.wait()
    assert_nobody_left(folder)
    assert list(metrics(folder / "run")) == [0, 1, 2]
    return folder, code, run.output()


def killed(folder, moment: str) -> None:
    """Start again, and die at that moment. What is on the disk then is the same without Ray, and quicker."""
    (folder / "kill").write_text(moment)
    run = ready_to_fork().Process(target=run_in_a_fork, args=(SETTINGS, folder))
    run.start()
    (folder / "driver").write_text(str(run.pid))
    run.join(LIMIT)
    output = (folder / "log.txt").read_text()
    assert run.exitcode == -signal.SIGKILL, output[-3000:]
    assert not (folder / "kill").exists()
    assert "Resuming from run/global_step_2: step 2 of 3 is done." in output


@pytest.fixture(scope="module")
def interrupted(stopped):
    """That run, killed in the third step's rewards, then in the third step's save, then left to finish."""
    folder, *_ = stopped
    run_dir = folder / "run"
    killed(folder, "score 3")
    assert sorted(p.name for p in run_dir.glob("global_step_*")) == ["global_step_2"]
    assert list(metrics(run_dir)) == [0, 1, 2]
    killed(folder, "save of .writing_global_step_3")
    assert (run_dir / ".writing_global_step_3").is_dir() and not (run_dir / "global_step_3").exists()
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text().split()[0] == "2"
    with (run_dir / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "da')  # a line that was being written
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()) as output:
        run_here(SETTINGS, folder, monkeypatch)
    assert "Resuming from run/global_step_2" in output.getvalue()
    return run_dir


def test_a_signal_lets_the_step_be_finished_and_saved(stopped):
    _, code, output = stopped
    assert code == 130 and "Traceback" not in output
    kept = "the same command goes on from run/global_step_2; report in run/report.html"
    last = f"stopped after step 2 of 3; {kept}; details in run/run.log"
    first, *rest = [line for line in output.splitlines() if "stop" in line]
    # In a file it stands behind the progress bar, which a terminal would have cleared.
    assert first.endswith("stopping: this step will be finished and saved (once more to stop at once)")
    assert rest == [last]


def test_a_run_leaves_what_the_documentation_promises(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    assert names == {
        "config.yaml", "metrics.jsonl", "run.log", "validation", "latest_checkpointed_iteration.txt",
        "global_step_2", "global_step_3", "starts.jsonl", "report.html", "training", "progress.json",
    }  # fmt: skip
    said = "Done: all of the run is in run, weights in run/global_step_3/export, report in run/report.html"
    assert said in (uninterrupted.parent / "log.txt").read_text().splitlines()
    page = (uninterrupted / "report.html").read_text()
    assert "Before and after" in page and "critic/rewards/std_mean" in page and "killer.py" in page
    at = json.loads((uninterrupted / "progress.json").read_text())
    assert (at["over"], at["step"], at["total"], at["done"]) == (0, 3, 3, 3)
    (start,) = read_starts(uninterrupted)
    assert start["step"] == 0 and "main_diffusion" in start["command"] and "lora_rank=4" in start["command"]
    assert (uninterrupted / "latest_checkpointed_iteration.txt").read_text().split()[0] == "3"
    assert sorted(p.name for p in (uninterrupted / "validation").iterdir()) == ["step_0", "step_2", "step_3"]
    rows = [json.loads(line) for line in (uninterrupted / "validation/step_3/samples.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1] and all(0 <= row["score"] <= 1 for row in rows)
    for row in rows:
        image = Image.open(uninterrupted / "validation/step_3" / row["image"])
        assert image.size == (32, 32)
        pixels = list(image.convert("L").getdata())
        assert sum(pixels) / len(pixels) / 255 == pytest.approx(row["score"], abs=1e-6)
    lora = load_file(uninterrupted / "global_step_3" / LORA)
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
    one, other = (load_file(run_dir / "global_step_3" / LORA) for run_dir in (uninterrupted, interrupted))
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    for path in (uninterrupted / "validation").rglob("*.png"):
        twin = interrupted / path.relative_to(uninterrupted)
        assert path.read_bytes() == twin.read_bytes()


def test_a_finished_run_is_said_to_be_finished_and_stays_as_it_is(interrupted, monkeypatch, capsys):
    before = {path: path.stat().st_mtime_ns for path in interrupted.rglob("*")}
    code, output = command_here(SETTINGS, interrupted.parent, monkeypatch, capsys)
    assert code == 0 and "The run in run is finished: all 3 steps are done" in output
    assert {path: path.stat().st_mtime_ns for path in interrupted.rglob("*")} == before


def test_nothing_of_the_broken_saves_is_left(interrupted):
    names = sorted(p.name for p in interrupted.iterdir() if "global_step" in p.name)
    assert names == ["global_step_3"], "nobody had asked for that of step 2"
    assert (interrupted / "latest_checkpointed_iteration.txt").read_text().split()[0] == "3"
