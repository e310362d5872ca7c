"""Which side waits, and how many devices would balance them."""

from unittest import mock

import pytest

from verl_omni.trainer.diffusion.idle import STEPS, Balance, BusyTime, shares


def timing(drawing: float, learning: float) -> dict[str, float]:
    """Of a step that learns while the next samples are drawn: it lasts as long as the slower of the two."""
    step = max(drawing, learning)
    return {"step": step, "gen": step - learning, "gen_images": drawing}


def said(drawing: float, learning: float, training: int = 1, rollout: int = 1) -> list[str]:
    balance = Balance(training, rollout)
    return [line for _ in range(3 * STEPS) if (line := balance.see(timing(drawing, learning)))]


def test_shares_of_a_step():
    assert shares(timing(2.0, 1.0)) == {"idle/training": 0.5, "idle/rollout": 0.0}
    assert shares(timing(1.0, 4.0)) == {"idle/training": 0.0, "idle/rollout": 0.75}


@pytest.mark.parametrize(("drawing", "learning"), [(1.0, 1.0), (1.0, 0.7), (0.7, 1.0)])
def test_nothing_is_said_where_both_are_busy(drawing, learning):
    assert said(drawing, learning) == []


def test_a_side_that_waits_is_named_once_with_what_would_balance():
    (line,) = said(drawing=3.0, learning=1.0)
    assert line.startswith("training waits for rollout 67% of the time: with 3 rollout devices for each that trains")
    assert "(now 1)" in line
    (line,) = said(drawing=1.0, learning=4.0, training=2, rollout=2)
    assert line.startswith("rollout waits for training 75% of the time: with 0.25 rollout devices")


def test_devices_in_that_ratio_take_equally_long():
    """Work is seconds times devices: three times as many draw, in a third of the time."""
    assert said(drawing=3.0 / 3, learning=1.0, training=1, rollout=3) == []


def test_seconds_in_which_servers_draw_are_counted_once():
    """One draws from 1 to 6, the other from 2 to 3; asked at 4 and at 10."""
    busy, clock = BusyTime(), "verl_omni.trainer.diffusion.idle.perf_counter"

    def at(now: float, what, *server: int):
        with mock.patch(clock, return_value=now):
            return what(*server)

    at(1, busy.begin, 0)
    at(2, busy.begin, 1)
    at(3, busy.end, 1)
    assert at(4, busy.take) == 3 + 1
    at(6, busy.end, 0)
    assert at(10, busy.take) == 2
    assert at(11, busy.take) == 0
