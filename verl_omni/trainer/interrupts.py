"""Ctrl-C and SIGTERM: a run that has something to lose finishes its step and saves; asked twice, it stops at once."""

import signal
import threading
from types import FrameType

from verl_omni.trainer.progress import is_watched, progress

_received: int | None = None


class Stopped(Exception):
    """The run was asked to stop, and has saved what it had."""


def listen() -> None:
    """After ray.init, which takes SIGTERM for itself. Only a main thread hears signals."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _note)


def stop_requested() -> bool:
    return _received is not None


def request_stop(number: int = signal.SIGINT) -> None:
    global _received
    _received = number


def exit_code() -> int:
    return 128 + (_received or signal.SIGINT)


def _note(number: int, _: FrameType | None) -> None:
    again = stop_requested()
    request_stop(number)
    if is_watched() and progress.done:  # who watches ends a run that is asked twice, and may hand a signal on twice
        return
    if again or not progress.done:
        raise KeyboardInterrupt
