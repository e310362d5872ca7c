import logging

import pytest

from verl_omni.utils import seldom


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(seldom.time, "monotonic", lambda: now[0])
    return now


def test_what_repeats_is_one_line_a_minute(clock, caplog):
    log = logging.getLogger("test_seldom")
    log.addFilter(seldom.Seldom())

    def fail(error: Exception, handle: int) -> None:
        try:
            raise error
        except Exception:
            log.exception("accept() failed\nsocket: %d", handle)

    for handle in range(500):
        fail(OSError(24, "Too many open files"), handle)
    fail(ValueError("another kind"), 500)
    clock[0] += 59
    fail(OSError(24, "Too many open files"), 501)
    clock[0] += 1
    fail(OSError(24, "Too many open files"), 502)
    first, other, later = caplog.records
    assert first.exc_info and first.getMessage() == "accept() failed\nsocket: 0"
    assert other.exc_info[0] is ValueError
    assert later.exc_info is None
    expected = "accept() failed (OSError: [Errno 24] Too many open files); 500 more like it since the last such line"
    assert later.getMessage() == expected
