"""How long this process has waited for torch's compiler."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any


class Clock:
    """Runs while anything is compiled, once something is going to be."""

    def __init__(self) -> None:
        self.counts = False
        self._seconds, self._taken = 0.0, 0.0
        self._running, self._since = 0, 0.0
        self._lock = threading.Lock()

    def start(self, *_: Any) -> None:
        with self._lock:
            self._running += 1
            if self._running == 1:
                self._since = perf_counter()

    def stop(self, *_: Any) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._seconds += perf_counter() - self._since

    @contextmanager
    def running(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def seconds(self) -> float:
        """Since the process began, what is being compiled now included."""
        with self._lock:
            return self._seconds + (perf_counter() - self._since if self._running else 0.0)

    def take(self) -> float:
        """Since this was asked before."""
        now = self.seconds()
        self._taken, before = now, self._taken
        return now - before

    def count(self) -> None:
        """From now on torch says when it compiles."""
        from torch._dynamo.callback import callback_handler

        if self.start not in callback_handler.start_callbacks:  # which torch._dynamo.reset() empties
            callback_handler.register_start_callback(self.start)
            callback_handler.register_end_callback(self.stop)
        self.counts = True


clock = Clock()
