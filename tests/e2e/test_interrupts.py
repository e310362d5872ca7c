"""Ctrl-C and SIGTERM on whole runs: one line, nothing left behind, and what was done is saved."""

import signal
import time

import pytest
from e2e_runs import LEARNING, LIMIT, Run, metrics, settings, user_folder
from safetensors.torch import load_file
from test_resume import SCORES_A_STEP, SCORES_OF_VALIDATION, assert_nobody_left

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

# The scores of the run to compare with. In the second step the first one waits until the signal is on its way.
COUNTS = f"""
import pathlib, time, killer

HERE, count = pathlib.Path(__file__).parent, 0

def compute_score(image, prompt):
    global count
    count += 1
    if count == {SCORES_OF_VALIDATION + SCORES_A_STEP + 1}:
        (HERE / "second step").touch()
        while not (HERE / "signalled").exists():
            time.sleep(0.01)
    return killer.compute_score(image, prompt)
"""
SETTINGS = settings("run", *LEARNING, "reward.custom_reward_function.path=counts.py", "trainer.save_freq=-1")


def wait_for(run: Run, happened) -> None:
    end = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < end and run.process.poll() is None, run.output()[-3000:]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """(folder, exit code, output) of a run that gets a Ctrl-C in the middle of its second step."""
    folder = user_folder(tmp_path_factory.mktemp("stopped"))
    (folder / "counts.py").write_text(COUNTS)
    run = Run(SETTINGS, folder)
    wait_for(run, (folder / "second step").exists)
    run.process.send_signal(signal.SIGINT)
    time.sleep(1)
    (folder / "signalled").touch()
    code = run.wait()
    assert_nobody_left(folder)
    return folder, code, run.output()


def test_the_step_is_finished_and_saved(stopped):
    folder, code, output = stopped
    assert code == 130 and "Traceback" not in output
    assert list(metrics(folder / "run")) == [0, 1, 2]
    last = "stopped after step 2 of 3; the same command goes on from run/global_step_2; details in run/run.log"
    first, *rest = [line for line in output.splitlines() if "stop" in line]
    # In a file it stands behind the progress bar, which a terminal would have cleared.
    assert first.endswith("stopping: this step will be finished and saved (once more to stop at once)")
    assert rest == [last]


def test_the_same_command_goes_on_as_if_nothing_had_been(stopped, uninterrupted):
    folder, *_ = stopped
    output = Run(SETTINGS, folder).succeed()
    assert "Resuming from run/global_step_2" in output
    expected, got = metrics(uninterrupted), metrics(folder / "run")
    assert list(got) == [0, 1, 2, 3] and all(expected[step] == got[step] for step in expected)
    name = "global_step_3/export/pytorch_lora_weights.safetensors"
    one, other = load_file(uninterrupted / name), load_file(folder / "run" / name)
    assert one.keys() == other.keys() and all((one[k] == other[k]).all() for k in one)
    assert not (folder / "run/global_step_2").exists(), "nobody had asked for it"


def test_a_signal_while_ray_starts(tmp_path):
    user_folder(tmp_path)
    run = Run(settings("run", *LEARNING), tmp_path)
    wait_for(run, (tmp_path / "run/run.log").exists)
    time.sleep(1)
    run.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert run.wait() == 143
    assert time.monotonic() - began < 20
    assert_nobody_left(tmp_path)
    *_, last = run.output().splitlines()
    assert last == "stopped by SIGTERM during the start of Ray; nothing was saved yet; details in run/run.log"
