"""A user's module that is never done with being imported ends with a line."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 600.0  # models are loaded on import, too


class TookTooLong(Exception):
    """It was not done in time."""


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Python code in here is ended by `TookTooLong`; one that catches that is ended again, every second.

    Only a main thread hears the clock: worker processes import what the command has imported before them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
