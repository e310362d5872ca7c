"""SDE windows: sequences over 100 and more training steps, in closed form."""

from collections import Counter

import numpy as np
import pytest

from verl_omni.config import DiffusionRolloutAlgoConfig as Algo
from verl_omni.pipelines.schedulers import check_window, sde_window


def starts(algo, num_steps, count=100, seed=0):
    windows = [sde_window(algo, num_steps, step, seed) for step in range(count)]
    assert all(len(w) == len(windows[0]) for w in windows)
    return [w.start for w in windows]


def test_default_is_all_steps_but_the_last():
    assert sde_window(Algo(), 10, training_step=3, seed=0) == range(0, 9)
    assert sde_window(Algo(sde_window_range=[2, 5]), 10, training_step=3, seed=0) == range(2, 5)


def test_random_start_is_uniform_over_lo_to_hi_minus_size_and_repeats_with_the_seed():
    algo = Algo(sde_window_size=2, sde_window_range=[1, 6])
    drawn = starts(algo, 10, count=4000)
    count = Counter(drawn)
    assert sorted(count) == [1, 2, 3, 4]
    assert min(count.values()) > 850 and max(count.values()) < 1150  # 1000 each, sd 27
    assert drawn == starts(algo, 10, count=4000)
    assert drawn[:100] != starts(algo, 10, count=100, seed=7)
    # step 7 of seed 0 is not step 0 of seed 7
    assert drawn[7:100] != starts(algo, 10, count=93, seed=7)


def test_groups_share_a_window_unless_each_is_to_have_its_own():
    shared = Algo(sde_window_size=1)
    assert len({sde_window(shared, 10, 5, 0, group) for group in range(50)}) == 1
    own = Algo(sde_window_size=1, sde_window_per_group=True)
    assert len({sde_window(own, 10, 5, 0, group) for group in range(50)}) == 9
    assert sde_window(own, 10, 5, 0, group=3) == sde_window(own, 10, 5, 0, group=3)
    with pytest.raises(ValueError, match="number of the prompt group"):
        sde_window(own, 10, 5, 0)


def test_progressive_in_closed_form():
    algo = Algo(
        sde_window_size=3,
        sde_window_range=[1, 9],
        sde_window_schedule="progressive",
        sde_window_iters=7,
        sde_window_stride=2,
    )
    step = np.arange(100)
    assert starts(algo, 10) == np.minimum(1 + step // 7 * 2, 6).tolist()


def test_moving_windows_have_mixgrpos_defaults():
    algo = Algo(sde_window_size=4, sde_window_schedule="progressive")
    assert starts(algo, 25, 700) == np.minimum(np.arange(700) // 25, 20).tolist()


@pytest.mark.parametrize("stride", [1, 3])
def test_exp_decay_in_closed_form(stride):
    algo = Algo(sde_window_size=4, sde_window_schedule="exp_decay", sde_window_iters=10, sde_window_stride=stride)
    places = np.append(np.arange(0, 20, stride), 20)
    stay = np.ceil(10 * np.exp(-0.1 * np.maximum(places - 13, 0))).astype(int)
    expected = np.repeat(places, stay)
    expected = np.append(expected, np.full(250, 20))[:250]
    assert starts(algo, 25, 250) == expected.tolist()
    assert stay.tolist()[-1] == 5  # it does move faster towards the end


def test_linear_decay_in_closed_form():
    algo = Algo(sde_window_size=2, sde_window_range=[2, 12], sde_window_schedule="decay", sde_window_iters=20)
    places = np.arange(2, 11)
    stay = [20, 18, 17, 15, 14, 12, 11, 9, 8]  # from 20 at t = 2 in a straight line to 5 at t = 12, rounded down
    expected = np.append(np.repeat(places, stay), np.full(100, 10))[:200]
    assert starts(algo, 13, 200) == expected.tolist()


def test_decay_moves_on_every_step_at_the_fastest():
    algo = Algo(sde_window_size=1, sde_window_schedule="decay", sde_window_iters=1)
    assert starts(algo, 10, 12) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("algo", "num_steps", "message"),
    [
        (Algo(sde_window_range=[0, 10]), 10, r"\[0, 10\] lies outside the 9 steps"),
        (Algo(sde_window_range=[5, 5]), 10, "expected 0 <= lo < hi <= 9"),
        (Algo(sde_window_range=[-1, 5]), 10, "outside"),
        (Algo(sde_window_range=[1, 2, 3]), 10, "expected two numbers"),
        (Algo(sde_window_size=10), 10, r"sde_window_size=10 does not fit into the steps \[0, 9\): expected 1 to 9"),
        (Algo(sde_window_size=0), 10, "expected 1 to 9"),
        (Algo(sde_window_size=4, sde_window_range=[2, 5]), 10, "expected 1 to 3"),
        (Algo(), 1, "use 2 or more"),
        (Algo(sde_window_schedule="progresive"), 10, 'did you mean "progressive"'),
        (Algo(sde_window_iters=0), 10, "sde_window_iters=0: expected 1 or more"),
        (Algo(sde_window_stride=-1), 10, "sde_window_stride=-1"),
    ],
)
def test_a_window_that_does_not_fit_is_said_before_anything_runs(algo, num_steps, message):
    with pytest.raises(ValueError, match=message):
        check_window(algo, num_steps)
    with pytest.raises(ValueError, match=message):
        sde_window(algo, num_steps, 0, 0)
