"""Requests that are being answered, each of which can be taken back by its name."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from verl_omni.utils.errors import RequestAborted

T = TypeVar("T")


class UnderWay:
    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task, str] = {}
        self._aborted: set[asyncio.Task] = set()

    async def answer(self, request_id: str, work: Coroutine[Any, Any, T], gone: Callable[[], None]) -> T:
        """What `work` gives. `RequestAborted`, at once, where somebody aborts it; work on it goes no further. `gone` is
        called then, and where whoever asked goes away: the work may not have begun."""
        task = asyncio.ensure_future(work)
        self._tasks[task] = request_id
        try:
            return await task
        except asyncio.CancelledError:
            gone()
            if task in self._aborted:
                raise RequestAborted(f"request {request_id} was aborted") from None
            task.cancel()  # whoever asked has gone
            raise
        finally:
            del self._tasks[task]
            self._aborted.discard(task)

    def abort(self, request_id: str) -> bool:
        """Whether there was such a request."""
        return bool(self._end([task for task, name in self._tasks.items() if name == request_id]))

    def abort_all(self) -> list[str]:
        """The names of those that there were."""
        return self._end(list(self._tasks))

    def _end(self, tasks: list[asyncio.Task]) -> list[str]:
        ended = [task for task in tasks if task.cancel()]  # False: its answer is there already
        self._aborted.update(ended)
        return [self._tasks[task] for task in ended]
