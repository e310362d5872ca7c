"""One event loop in a thread of its own: for what goes on while the main thread does other work."""

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    # More threads than a loop has by itself: some only wait, and others must not wait for those.
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(64, thread_name_prefix="background"))
    threading.Thread(target=loop.run_forever, name="background", daemon=True).start()
    return loop


def start(work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
    """Begin it there; its result or its error is in what comes back."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Its result, from any other thread."""
    return start(work).result()
