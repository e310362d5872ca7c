"""A worker that dies, a reward that fails: the run ends with that error shown, and does not hang."""

import os
import re

import pytest
from e2e_runs import SCORES_A_STEP, SCORES_OF_VALIDATION, QuickRun, settings

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

# The reward function is the test's hand inside the run: it finds a worker of the model and kills it, once.
KILL_A_WORKER = """
import os, pathlib, signal

def compute_score(prompt):
    workers = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            title = pathlib.Path(f"/proc/{pid}/cmdline").read_text()
            mine = str(pathlib.Path(__file__).parent) in pathlib.Path(f"/proc/{pid}/environ").read_text()
        except OSError:
            continue
        if mine and "DiffusionWorker" in title:
            workers.append(int(pid))
    if not workers:  # asked before the run starts
        return 1.0
    try:
        with pathlib.Path(__file__).with_name("killed").open("x") as killed:
            killed.write(str(min(workers)))
    except FileExistsError:
        return 1.0
    os.kill(min(workers), signal.SIGKILL)
    return 1.0
"""


def test_one_of_two_workers_is_killed(tmp_path):
    (tmp_path / "reward.py").write_text(KILL_A_WORKER)
    two = ("trainer.n_gpus_per_node=2", "reward.custom_reward_function.path=reward.py")
    run = QuickRun(settings("run", *two), tmp_path)
    assert run.wait() > 0
    killed = (tmp_path / "killed").read_text()
    *_, last = run.output().splitlines()
    died = rf"error: model worker \d \(pid {killed}\) died during the .+: it was killed, or it crashed; nothing"
    assert re.match(died, last) and last.endswith("; details in run/run.log")
    assert "Traceback" not in run.output() and "raylet" not in run.output()
    assert "Traceback" in (tmp_path / "run/run.log").read_text()
    assert not os.path.exists(f"/proc/{killed}")


ENDS_IN_STEP_2 = """
import os

calls = 0

def compute_score(prompt):
    global calls
    calls += 1
    if calls > {calls}:
        os._exit(1)
    return float(calls)
"""


def test_a_reward_that_ends_its_process_is_one_line_and_costs_no_step(tmp_path):
    (tmp_path / "reward.py").write_text(ENDS_IN_STEP_2.format(calls=SCORES_OF_VALIDATION + SCORES_A_STEP))
    run = QuickRun(settings("run", "reward.custom_reward_function.path=reward.py"), tmp_path)
    assert run.wait() == 1
    *_, last = run.output().splitlines()
    died = r"error: reward process 0 \(pid \d+\) died during the \w+ of step 2: it was killed, or it crashed"
    end = "; the same command goes on from run/global_step_1; report in run/report.html; details in run/run.log"
    assert re.fullmatch(died + re.escape(end), last)
    assert (tmp_path / "run/report.html").exists() and (tmp_path / "run/global_step_1/manifest.json").exists()
    assert "Traceback" not in run.output()


@pytest.mark.slow  # trainer/test_failure_lines.py has the way of such an error through Ray, without a run
def test_a_failing_reward_ends_the_run_with_one_line(tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(prompt):\n    return {}[prompt]\n")
    run = QuickRun(settings("run", "reward.custom_reward_function.path=reward.py"), tmp_path)
    assert run.wait() == 1
    *_, last = (line for line in run.output().splitlines() if line.strip())
    assert last.startswith("error: reward function compute_score (reward.py) raised KeyError: 'a")
    assert "Traceback" not in run.output()
