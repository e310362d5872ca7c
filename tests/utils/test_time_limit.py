"""A module of the user's that never comes to its end is refused with a line."""

import signal

import pytest

from verl_omni.rewards.reward_function import RewardFunction
from verl_omni.utils.external_lib import import_external_lib
from verl_omni.utils.time_limit import TookTooLong, time_limit

STUBBORN = """
while True:
    try:
        while True:
            pass
    except ValueError:
        pass
"""


def test_a_reward_that_loops_on_import(tmp_path):
    (tmp_path / "mine.py").write_text(STUBBORN)
    expected = r'path=".*mine.py" is still being imported after 0.1 s: mend it, or raise reward.timeout$'
    with pytest.raises(ValueError, match=expected):
        RewardFunction.load(str(tmp_path / "mine.py"), "compute_score", timeout=0.1)


def test_a_module_that_loops_on_import(tmp_path, monkeypatch):
    (tmp_path / "endless_module.py").write_text(STUBBORN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("verl_omni.utils.external_lib.time_limit", lambda: time_limit(0.1))
    with pytest.raises(ValueError, match='external_lib="endless_module" cannot be imported: .*not done after 0.1 s'):
        import_external_lib("endless_module")


def test_the_clock_is_given_back():
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(100):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 90
    with pytest.raises(TookTooLong), time_limit(0.01):
        while True:
            pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and signal.getsignal(signal.SIGALRM) is before
