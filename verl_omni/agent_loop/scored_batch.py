"""Images that are being made, each scored as soon as it exists."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from verl_omni.agent_loop.outputs import DiffusionAgentLoopOutput


class ScoredBatch:
    """Images that are being made and scored, each scored as soon as it exists. The first failure ends all of it."""

    def __init__(
        self,
        loops: list[Coroutine[Any, Any, DiffusionAgentLoopOutput]],
        rows: list[dict[str, Any]],
        score: Callable[[DiffusionAgentLoopOutput, dict[str, Any]], Awaitable[None]],
    ):
        async def scored(image: asyncio.Task, row: dict[str, Any]) -> DiffusionAgentLoopOutput:
            output = await image
            await score(output, row)
            return output

        self.rows = rows
        self._images = [asyncio.create_task(loop) for loop in loops]
        self._scores = [asyncio.create_task(scored(*pair)) for pair in zip(self._images, rows, strict=True)]
        self._failure = asyncio.get_running_loop().create_future()
        for task in self._images + self._scores:
            task.add_done_callback(self._note_failure)

    def _note_failure(self, task: asyncio.Task) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_result(error)  # the first one is told

    async def images(self) -> list[DiffusionAgentLoopOutput]:
        """All images; their scores may still be missing."""
        return await self._results(self._images)

    async def scores(self) -> list[DiffusionAgentLoopOutput]:
        return await self._results(self._scores)

    async def _results(self, wanted: list[asyncio.Task]) -> list[DiffusionAgentLoopOutput]:
        results = asyncio.gather(*wanted, return_exceptions=True)
        try:
            await asyncio.wait([results, self._failure], return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            return [task.result() for task in wanted]
        except BaseException:
            for task in self._images + self._scores:
                task.cancel()
            raise
