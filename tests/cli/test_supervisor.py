"""The process that watches a run ends all of it, says in one line what happened, and lets a step be saved."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from verl_omni.report.run_state import read_state

# A run of three steps that starts a process of its own, deaf to signals and in a session of its own, as Ray's are.
RUN = """
import pathlib, signal, subprocess, sys, time
from verl_omni.cli import supervisor
from verl_omni.trainer import interrupts
from verl_omni.trainer.progress import tell

supervisor.SECONDS_TO_END = 1.0
supervisor.watch()
here = pathlib.Path({folder!r})
daemon = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
other = subprocess.Popen([sys.executable, "-c", daemon], start_new_session=True)
(here / "daemon").write_text(str(other.pid))
(here / "run").mkdir()
interrupts.listen()
tell(run_dir=str(here / "run"), stage="rollout", step={step}, done={step} - 1, saves={saves})
print("ready", flush=True)
{then}
"""
WAIT = "time.sleep(60)"
STEP = """
while not interrupts.stop_requested():
    time.sleep(0.01)
time.sleep({seconds})  # the rest of the step
saved = here / "run/global_step_2"
saved.mkdir()
(saved / "manifest.json").touch()
print("saved", flush=True)
sys.exit(interrupts.exit_code())
"""


class Watched:
    def __init__(self, folder, then: str, step: int = 1, saves: bool = True):
        self.folder = folder
        code = RUN.format(folder=str(folder), then=then, step=step, saves=saves)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"

    def end(self) -> tuple[int, str]:
        """(exit code, stderr), once it is shown that nothing is left."""
        _, said = self.process.communicate(timeout=30)
        assert not psutil.pid_exists(int((self.folder / "daemon").read_text()))
        return self.process.returncode, said


@pytest.mark.parametrize("number, name", [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_before_there_is_anything_to_save(tmp_path, number, name):
    run = Watched(tmp_path, WAIT)
    run.process.send_signal(number)
    code, said = run.end()
    log = tmp_path / "run/run.log"
    assert said == f"stopped by {name} during the rollout of step 1; nothing was saved yet; details in {log}\n"
    assert code == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_step(tmp_path, number):
    run = Watched(tmp_path, STEP.format(seconds=0.5), step=2)
    run.process.send_signal(number)
    assert run.process.stdout.readline() == "saved\n"
    code, said = run.end()
    assert said.splitlines() == ["stopping: this step will be finished and saved (once more to stop at once)"]
    assert code == 128 + number


def test_a_signal_where_nothing_is_saved(tmp_path):
    unsaved = STEP.replace("saved.mkdir()", "").replace('(saved / "manifest.json").touch()', "")
    run = Watched(tmp_path, unsaved.format(seconds=0), step=2, saves=False)
    run.process.send_signal(signal.SIGINT)
    code, said = run.end()
    (line,) = said.splitlines()
    assert line.startswith("stopping: this step will be finished but not saved, as trainer.save_freq=0")
    assert code == 130


def test_a_second_signal_does_not_wait(tmp_path):
    run = Watched(tmp_path, STEP.format(seconds=600), step=2)
    run.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    run.process.send_signal(signal.SIGINT)
    code, said = run.end()
    assert code == 130 and "stopped by Ctrl-C during the rollout of step 2; nothing was saved yet" in said


def test_one_request_that_arrives_twice_is_one(tmp_path):
    """`timeout` signals its child and then its whole group."""
    run = Watched(tmp_path, STEP.format(seconds=1), step=2)
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)
    code, said = run.end()
    assert said.splitlines() == ["stopping: this step will be finished and saved (once more to stop at once)"]
    assert code == 143


def test_a_driver_that_is_killed(tmp_path):
    run = Watched(tmp_path, "import os; os.kill(os.getpid(), signal.SIGKILL)", step=3)
    code, said = run.end()
    assert code == 1
    assert said.startswith("error: the driver (pid ") and len(said.splitlines()) == 1
    assert "was killed by SIGKILL during the rollout of step 3; nothing was saved yet; details in " in said


def test_of_a_driver_that_is_killed_there_is_a_report(tmp_path):
    """And whoever looks from outside reads how it ended."""
    then = '(here / "run/metrics.jsonl").write_text(\'{"step": 1, "data": {"critic/rewards/mean": 0.5}}\\n{"st\')'
    run = Watched(tmp_path, f"{then}; import os; os.kill(os.getpid(), signal.SIGKILL)", step=2)
    code, said = run.end()
    report = tmp_path / "run/report.html"
    assert code == 1 and f"; report in {report}; details in " in said and report.stat().st_size
    state = read_state(tmp_path / "run")
    assert state.word == "failed" and state.line.endswith("was killed by SIGKILL during the rollout of step 2")


def test_a_run_that_is_over_and_does_not_end(tmp_path):
    run = Watched(tmp_path, 'tell(over=1, last="error: the reward failed"); time.sleep(600)')
    code, said = run.end()
    assert code == 1 and said.startswith("error: the reward failed; nothing was saved yet")


def test_a_driver_that_ends_without_a_word(tmp_path):
    """Ray's own code does that to a process that has lost its cluster."""
    code, said = Watched(tmp_path, "import os; os._exit(1)", step=3).end()
    assert code == 1 and len(said.splitlines()) == 1
    assert "ended with exit code 1 and without a word during the rollout of step 3; nothing was saved yet" in said


def test_what_a_run_leaves_behind_is_ended(tmp_path):
    assert Watched(tmp_path, "tell(over=7); sys.exit(7)").end() == (7, "")


def test_nothing_outlives_the_watching_process(tmp_path):
    run = Watched(tmp_path, WAIT)
    (driver,) = psutil.Process(run.process.pid).children()
    run.process.kill()
    psutil.wait_procs([driver], timeout=10)
    assert not driver.is_running()
    os.kill(int((tmp_path / "daemon").read_text()), signal.SIGKILL)  # ours alone: Ray's end with their driver


def test_a_command_whose_streams_are_closed(tmp_path):
    """As some launchers of services start one. Nothing else is where a process expects its input and output."""
    code = (
        "import subprocess, sys; from verl_omni.cli import supervisor, train\n"
        "supervisor.watch = lambda: sys.exit(subprocess.run(['ls', '-l', '/proc/self/fd'], stdout=2).returncode)\n"
        "sys.argv[1:] = ['a.b=1']; train.command()"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, code]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0 -> /dev/null" in done.stderr
