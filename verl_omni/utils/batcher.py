"""Gather single asynchronous calls into batches."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class _Call:
    item: Any
    key: Hashable
    position: tuple | None
    guest: bool
    done: asyncio.Future


class Batcher:
    """Runs `work(items) -> results` in a background thread, on up to `max_size` waiting items of one key at a time.

    `parallel` batches are worked on at once, each in a thread. A result that is an exception is raised to its caller.

    A call may say its `position` (index, total, burst) in a burst; without a name the burst is that of its key.
    Batches are then the consecutive blocks of the burst, whatever the order of arrival, so that a run repeats bit for
    bit. Calls of a block whose keys differ make a batch for each key. A place that nobody will take is given back by
    `withdraw`. Other calls are batched by a short wait.

    A block of `guest` calls waits its turn, and after it others go first: whatever guests ask for, others have every
    second batch. A call whose caller has gone before its turn is forgotten, and its place given back.
    """

    def __init__(self, work: Callable[[list[Any]], list[Any]], max_size: int, max_wait_s: float, parallel: int = 1):
        self.work, self.max_size, self.max_wait_s, self.parallel = work, max_size, max_wait_s, parallel
        self._waiting: list[_Call] = []
        self._running: list[_Call] = []
        self._ready: list[list[_Call]] = []
        self._withdrawn: set[tuple] = set()
        self._guest_was_last = False
        self._pump: asyncio.Task | None = None
        self._working: set[asyncio.Task] = set()
        self._threads = concurrent.futures.ThreadPoolExecutor(parallel)

    async def submit(self, item: Any, key: Hashable = None, position: tuple | None = None, guest: bool = False) -> Any:
        """The result of `work` on this item. A guest says its position in a burst of its own."""
        loop = asyncio.get_running_loop()
        call = _Call(item, key, position, guest, loop.create_future())
        self._waiting.append(call)
        if position is not None:  # somebody takes it after all
            self._withdrawn.discard((*position[:2], burst_of(call)))
        if self._pump is None or self._pump.done():
            self._arrived = asyncio.Event()
            self._pump = loop.create_task(self._run())
            self._pump.add_done_callback(self._fail_waiting)
        self._arrived.set()
        try:
            return await call.done
        except asyncio.CancelledError:
            self._forget(call)
            raise

    @property
    def waiting(self) -> int:
        """Calls that nobody works on yet; guests are counted by who lets them in."""
        return sum(not call.guest for call in [*self._waiting, *sum(self._ready, [])])

    def withdraw(self, position: tuple) -> None:
        """Nobody will call from this place of a named burst."""
        index, total, burst = position
        self._withdrawn.add((index, total, burst))
        places = self._places(burst, total, index // self.max_size)
        if places <= self._withdrawn:  # nobody will ask for the block: what is left of it would be in a later one's way
            self._withdrawn -= places
        if self._pump is not None and not self._pump.done():
            self._arrived.set()

    def _forget(self, call: _Call) -> None:
        """Where work on it has begun, its result is thrown away."""
        if call in self._waiting:
            self._waiting.remove(call)
            if call.position is not None:
                self.withdraw((*call.position[:2], burst_of(call)))
        self._ready = [left for batch in self._ready if (left := [c for c in batch if c is not call])]

    def close(self, error: Exception) -> None:
        """Every call that waits gets this error. From the event loop that the calls came from."""
        self._fail([*self._waiting, *(call for batch in self._ready for call in batch)], error)
        self._waiting, self._ready = [], []
        if self._pump is not None and not self._running:
            self._pump.cancel()

    def _fail_waiting(self, task: asyncio.Task) -> None:
        """If the loop itself breaks, nobody may wait for it for ever."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            error = RuntimeError(f"the batch loop ended: {type(error).__name__}: {error}")
            self._running, running = [], self._running
            self._fail(running, error)
            self.close(error)

    def _fail(self, calls: list[_Call], error: Exception) -> None:
        for call in calls:
            if not call.done.done():
                call.done.set_exception(error)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting or self._ready:
            if len(self._working) == self.parallel:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            batch = await self._next_batch()
            self._running += batch
            task = loop.create_task(self._work_on(batch))
            self._working.add(task)
            task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task) -> None:
        self._working.discard(task)
        self._fail_waiting(task)
        self._arrived.set()

    async def _work_on(self, batch: list[_Call]) -> None:
        try:
            items = [c.item for c in batch]
            results = await asyncio.get_running_loop().run_in_executor(self._threads, self.work, items)
            if len(results) != len(batch):
                raise ValueError(f"a batch of {len(batch)} gave {len(results)} results: expected one for each")
        except Exception as error:  # every caller of the batch gets it
            results = [error] * len(batch)
        for call, result in zip(batch, results, strict=True):
            if call.done.done():  # its caller has gone
                continue
            if isinstance(result, Exception):
                call.done.set_exception(result)
            else:
                call.done.set_result(result)
        self._running = [call for call in self._running if call not in batch]

    async def _next_batch(self) -> list[_Call]:
        while True:
            for call in [c for c in self._waiting + sum(self._ready, []) if c.done.cancelled()]:
                self._forget(call)  # its own task may not have been told yet
            if self._ready:
                return self._ready.pop(0)
            loose = [c for c in self._waiting if c.position is None]
            same = [c for c in loose if c.key == loose[0].key][: self.max_size] if loose else []
            block = self._whole_block()
            if block and not (self._guest_was_last and block[0].guest and loose):
                self._guest_was_last = block[0].guest
                self._take(block)
                keys = dict.fromkeys(call.key for call in block)
                self._ready = [[call for call in block if call.key == key] for key in keys]
                continue
            if block or len(same) == self.max_size:
                return self._take_loose(same)
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), self.max_wait_s if loose else None)
            except asyncio.TimeoutError:
                same = [c for c in same if c in self._waiting]  # the others' callers have gone
                if same:
                    return self._take_loose(same)

    def _whole_block(self) -> list[_Call]:
        """The first block of a burst of which every member has arrived; a second one of guests only if it is alone."""
        blocks: dict[Any, dict[int, _Call]] = {}
        for call in self._waiting:
            if call.position is not None:
                index, total, *_ = call.position
                # Where two bursts overlap, the later call of an index waits for the next round.
                blocks.setdefault((burst_of(call), total, index // self.max_size), {}).setdefault(index, call)

        def turn(block: tuple[tuple, dict[int, _Call]]) -> tuple[bool, int]:
            (_, _, number), calls = block
            return self._guest_was_last and next(iter(calls.values())).guest, number

        for (burst, total, number), calls in sorted(blocks.items(), key=turn):
            places = self._places(burst, total, number)
            empty = places & self._withdrawn
            if places == empty | {(index, total, burst) for index in calls}:
                self._withdrawn -= empty
                return [calls[index] for index in sorted(calls)]
        return []

    def _places(self, burst: Hashable, total: int, block: int) -> set[tuple]:
        first = block * self.max_size
        return {(index, total, burst) for index in range(first, min(first + self.max_size, total))}

    def _take_loose(self, batch: list[_Call]) -> list[_Call]:
        self._guest_was_last = False
        return self._take(batch)

    def _take(self, batch: list[_Call]) -> list[_Call]:
        self._waiting = [c for c in self._waiting if c not in batch]
        return batch


def burst_of(call: _Call) -> Hashable:
    return call.position[2] if len(call.position) > 2 else call.key
