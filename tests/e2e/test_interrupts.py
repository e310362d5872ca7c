"""Signals before there is anything to save, and nothing is left. test_resume.py has a Ctrl-C in a step."""

import signal
import time

import pytest
from e2e_runs import LEARNING, Run, assert_nobody_left, settings, user_folder

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy


def test_a_signal_while_ray_starts(tmp_path):
    user_folder(tmp_path)
    run = Run(settings("run", *LEARNING), tmp_path)
    run.wait_for(tmp_path / "run/run.log")
    time.sleep(0.2)  # half a second is all it takes
    run.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert run.wait() == 143
    assert time.monotonic() - began < 20
    assert_nobody_left(tmp_path)
    *_, last = run.output().splitlines()
    stage = "start of Ray" if "start of Ray" in last else "loading of the model"
    assert last == f"stopped by SIGTERM during the {stage}; nothing was saved yet; details in run/run.log"


@pytest.mark.slow  # it waits for Ray's processes to end by themselves; test_failures.py has later kills
def test_a_kill_while_ray_starts(tmp_path):
    """Nobody can say a word, and Ray's processes end by themselves."""
    user_folder(tmp_path)
    run = Run(settings("run", *LEARNING), tmp_path)
    run.wait_for(tmp_path / "run/run.log")
    time.sleep(0.2)
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    assert_nobody_left(tmp_path)
