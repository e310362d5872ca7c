"""Between the checkpoints that were asked for, one by the clock: it makes room for the next, and never for itself."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from verl_omni.config.schema import TrainerConfig
from verl_omni.trainer import interrupts
from verl_omni.trainer.run_folder import checkpointing, saving
from verl_omni.trainer.run_folder.checkpoints import Checkpoints
from verl_omni.trainer.run_folder.saving import Saving
from verl_omni.workers.engine.base import DiffusionEngine
from verl_omni.workers.engine.checkpoint_io import Writing


@pytest.fixture
def clock(monkeypatch):
    """Minutes since the start; set `now[0]`."""
    now = [0.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: 60 * now[0])
    return now


def test_by_default_every_quarter_of_an_hour(clock, tmp_path):
    when = Saving(TrainerConfig())
    due = []
    for step in range(1, 13):
        clock[0] += 5  # minutes a step
        if when.is_due(step, last=step == 12):
            due.append(step)
            when.saved(tmp_path, step)
    assert due == [3, 6, 9, 12]
    assert [step for step in due if when.is_asked_for(step, last=step == 12)] == [12]


def test_not_by_the_clock_where_it_is_off(clock):
    off, never = Saving(TrainerConfig(save_minutes=0)), Saving(TrainerConfig(save_freq=0))
    clock[0] = 1e6
    assert not off.is_due(5, last=False) and off.is_due(5, last=True)
    assert not never.is_due(5, last=True)


def test_a_stop_is_a_reason_to_save(monkeypatch):
    when, never = Saving(TrainerConfig()), Saving(TrainerConfig(save_freq=0))
    assert not when.is_due(5, last=False)
    monkeypatch.setattr(interrupts, "_received", 2)
    assert when.is_due(5, last=False) and not never.is_due(5, last=False)


def test_only_what_nobody_asked_for_makes_room(clock, tmp_path):
    when = Saving(TrainerConfig(save_freq=10))
    for step in (10, 14, 20, 23):
        folder = tmp_path / f"global_step_{step}"
        folder.mkdir()
        (folder / "manifest.json").touch()
        if not when.is_asked_for(step, last=False):
            when.mark(folder)
        when.saved(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_10", "global_step_20", "global_step_23"]


def test_what_is_still_being_written_is_not_begun_again(clock):
    when = Saving(TrainerConfig(save_minutes=15))
    clock[0] = 15
    assert when.is_due(3, last=False)
    when.begins(3)
    clock[0] = 16
    assert not when.is_due(4, last=False)
    clock[0] = 30
    assert when.is_due(5, last=False)


def test_the_best_is_the_best_before_it_is_on_the_disk(tmp_path):
    when = Saving(TrainerConfig(keep_best=True))
    assert when.see(1, {"val-core/a": 0.9}, tmp_path)["training/best_step"] == 1
    assert when.see(2, {"val-core/a": 0.5}, tmp_path) == {"training/best_step": 1.0, "training/best_score": 0.9}
    assert when.best_score(2) is None
    (tmp_path / checkpointing.BEST).write_text("1\n0.9\n")
    assert when.see(3, {"val-core/a": 0.95}, tmp_path)["training/best_step"] == 3


# ---- one rank fails


def failed(error: Exception) -> Future:
    future = Future()
    future.set_exception(error)
    return future


def test_an_error_of_what_is_written_behind_is_told_once():
    engine = SimpleNamespace(writing=Writing([failed(OSError("no"))]))
    with pytest.raises(OSError):
        DiffusionEngine.checkpoint_written(engine, wait=True)
    assert DiffusionEngine.checkpoint_written(engine, wait=True)


def test_an_error_is_told_when_the_rest_has_been_written():
    late = Future()
    threading.Timer(0.05, late.set_result, [None]).start()
    with pytest.raises(OSError):
        Writing([failed(OSError("no")), late]).done(wait=True)
    assert late.done()


def test_nothing_is_deleted_that_another_rank_still_writes(tmp_path):
    there = []
    checkpoints = object.__new__(Checkpoints)
    checkpoints._give_up = lambda: there.append(place.is_dir())
    checkpoints.unpublished = checkpointing.Unpublished(tmp_path, 1, {})
    place = checkpoints.unpublished.place

    def checkpoint_written(wait: bool) -> list[bool]:
        raise OSError("one of them")

    with pytest.raises(OSError, match="one of them"):
        checkpoints.finish(SimpleNamespace(checkpoint_written=checkpoint_written))
    assert there == [True] and not place.exists()


def test_the_first_error_is_told_where_the_rest_cannot_be_deleted(tmp_path):
    unpublished = checkpointing.Unpublished(tmp_path, 1, {})
    with pytest.raises(OSError, match="the first"), unpublished.writing() as place:
        place.rmdir()
        raise OSError("the first")
