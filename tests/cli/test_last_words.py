"""Whatever ends a run is one line: the user's words where there are some, else what failed, and during what."""

import pytest
import torch
from ray.exceptions import ActorDiedError, RayTaskError

from verl_omni.cli.supervisor import last_words
from verl_omni.trainer import failures
from verl_omni.trainer.failures import Dead, in_one_line, what_failed
from verl_omni.trainer.interrupts import Stopped
from verl_omni.trainer.progress import Progress, progress, timer
from verl_omni.utils.errors import RunError


@pytest.fixture(autouse=True)
def second_step(monkeypatch):
    for name, value in vars(Progress(stage="update", step=2)).items():
        monkeypatch.setattr(progress, name, value)
    monkeypatch.setattr(failures, "_processes", {})


def in_a_worker(error: Exception) -> Exception:
    """As Ray raises it here: with the traceback of the worker in its text."""
    return RayTaskError("update_actor", "Traceback (most recent call last):\n  ...\n  x\n", error).as_instanceof_cause()


OUT_OF_MEMORY = "the update ran out of GPU memory. What may help:\n  - lower a.b\n  - set c=true"


@pytest.mark.parametrize(
    "error, line",
    [
        (RunError("reward.py returned None"), "reward.py returned None"),
        (in_a_worker(RunError("reward.py returned None")), "reward.py returned None"),
        (in_a_worker(in_a_worker(ValueError("lora_rank is odd"))), "lora_rank is odd"),
        (in_a_worker(KeyError("latents")), "KeyError during the update of step 2: 'latents'"),
        (
            in_a_worker(torch.OutOfMemoryError(OUT_OF_MEMORY)),
            "the update ran out of GPU memory. What may help: - lower a.b - set c=true",
        ),
        (in_a_worker(AssertionError()), "AssertionError during the update of step 2: AssertionError"),
    ],
)
def test_an_error_of_any_process(error, line):
    assert what_failed(error) == line


def test_a_process_that_died_is_named_whoever_noticed_it(monkeypatch):
    monkeypatch.setattr(failures, "dead_processes", lambda: iter([Dead("model worker 1", 4711, None)]))
    line = "model worker 1 (pid 4711) died during the update of step 2: it was killed, or it crashed"
    assert what_failed(ActorDiedError()) == line
    assert what_failed(in_a_worker(ActorDiedError())) == line
    assert what_failed(in_a_worker(RuntimeError("Connection closed by peer"))) == line


def test_a_machine_that_died_is_named_with_what_it_took_along(monkeypatch):
    dead = [Dead("model worker 2", 7, "10.0.0.3"), Dead("model worker 3", 8, "10.0.0.3")]
    monkeypatch.setattr(failures, "dead_processes", lambda: iter(dead))
    line = "node 10.0.0.3 died during the update of step 2, and model worker 2 and model worker 3 with it"
    assert what_failed(ActorDiedError()) == line
    assert what_failed(in_a_worker(RuntimeError("Connection closed by peer"))) == line


def test_a_stage_that_fails_is_remembered():
    with timer({}, "ref"):
        assert progress.stage == "reference pass"
    assert progress.stage == "update"
    with pytest.raises(RunError, match="^KeyError during the saving of step 2: 1$"):
        with in_one_line(), timer({}, "save_checkpoint"):
            raise KeyError(1)
    assert progress.over == 1 and progress.last == "error: KeyError during the saving of step 2: 1"


def test_a_stop_is_no_error():
    with pytest.raises(Stopped):
        with in_one_line():
            raise Stopped("stopped after step 2 of 3")
    assert progress.over == 130 and progress.last == "stopped after step 2 of 3"


@pytest.mark.parametrize("mode, how", [("auto", ""), ("disable", " with trainer.resume_mode=auto")])
def test_where_to_go_on(tmp_path, mode, how):
    at = Progress(run_dir=str(tmp_path), resume_mode=mode)
    assert last_words(at) == f"; nothing was saved yet; details in {tmp_path}/run.log"
    for step in (9, 10):
        (tmp_path / f"global_step_{step}").mkdir()
        (tmp_path / f"global_step_{step}/manifest.json").touch()
    going_on = f"; the same command{how} goes on from {tmp_path}/global_step_10"
    assert last_words(at) == f"{going_on}; details in {tmp_path}/run.log"
    assert last_words(Progress()) == "", "before there is a folder"


def test_what_there_is_to_read(tmp_path):
    at = Progress(run_dir=str(tmp_path), saves=False, report="run/report.html")
    nothing = "; nothing was saved, as trainer.save_freq=0; report in run/report.html; details in "
    assert last_words(at) == f"{nothing}{tmp_path}/run.log"
