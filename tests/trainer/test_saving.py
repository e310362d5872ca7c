"""Between the checkpoints that were asked for, one by the clock: it makes room for the next, and never for itself."""

import pytest

from verl_omni.config.schema import TrainerConfig
from verl_omni.trainer import interrupts
from verl_omni.trainer.run_folder import saving
from verl_omni.trainer.run_folder.saving import Saving


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
