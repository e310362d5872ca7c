"""`trainer.mode=fully_async`: servers draw group after group, and no side waits for the other before it has to.

Each server draws with the newest weights that were published when it began; in between it takes new ones. Rewards come
in by themselves. All this goes on in an event loop beside the main thread, which learns. What was trained, and the
version that drew it, is in `order.jsonl` of the run's folder, from which `trainer.replay` repeats a run.
"""

import asyncio
import math
from collections.abc import Coroutine
from time import perf_counter
from typing import Any

from verl.protocol import DataProto

from verl_omni.agent_loop.outputs import join
from verl_omni.report.tracking import JsonLines
from verl_omni.trainer.diffusion.experience import Experience
from verl_omni.trainer.diffusion.group_queue import Group, GroupQueue
from verl_omni.trainer.diffusion.idle import BusyTime
from verl_omni.trainer.diffusion.pace import DrawnGroup, Pace
from verl_omni.trainer.diffusion.replay import ORDER, RecordedQueue
from verl_omni.trainer.diffusion.rollouts import Weights
from verl_omni.utils.background import wait_for


class FullyAsync(Pace):
    """An experience is the next groups that were scored, whichever weights drew them; see `group_queue`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.overlaps = self.run.config.trainer.max_staleness != 0
        self.filter = self.draws.group_filter
        self.queue = self._queue()
        self.opened = self.queue.first  # the next step whose prompts are to be read
        self._rows: dict[int, DataProto] = {}  # the prompts of the steps that are not trained as a whole
        self._before: dict[int, dict[str, Any]] = {}  # and where in the data each of them begins
        self._order = JsonLines(self.run.folder / ORDER, self.run.step or None)
        self._busy, self._told = BusyTime(), {}
        self._failure: BaseException | None = None
        self._arrived, self._tasks = asyncio.Event(), set()
        self._turns, self._settled = [asyncio.Lock() for _ in range(self.draws.num_servers)], False
        wait_for(self._start())

    def _queue(self) -> GroupQueue:
        config, trainer = self.run.config, self.run.config.trainer
        batch_size, steps = config.data.train_batch_size, self.run.total_steps
        if trainer.replay:
            return RecordedQueue(batch_size, steps, trainer.replay)
        rollout = config.actor_rollout_ref.rollout
        share = math.ceil(batch_size / self.draws.num_servers)
        # As many as one forward takes; more would only wait longer for new weights. In turn there are none to wait for.
        at_once = min(share, max(1, rollout.max_num_seqs // rollout.n)) if self.overlaps else share
        done = self.run.step
        state = self.trained_groups or {"first": done}
        keep = trainer.stale_groups == "keep"
        spare = 0 if self.filter is None else (self.filter.config.max_num_gen_batches - 1) * batch_size
        return GroupQueue(batch_size, steps, at_once, trainer.max_staleness, keep, **state, done=done, spare=spare)

    # ---- the main thread -----------------------------------------------------------------------------

    def next(self) -> Experience:
        step, weights = self.run.step, self.draws.publish()
        dropped, groups = self.queue.dropped, []
        while not groups:  # where some were passed over, others have to be read
            steps = range(self.opened, self.queue.horizon(step) + 1)
            for number in steps:
                self._before[number] = self.prompts.state_dict()
                self._rows[number] = self.prompts.take()
            self.opened += len(steps)
            groups, drawing, filtered = wait_for(self._take(weights, steps))
        for number in [number for number in self._rows if number < self.queue.first]:
            del self._rows[number], self._before[number]
        now = perf_counter()
        self._told = {
            "queue/length": float(len(self.queue.scored)),
            "queue/dropped": float(self.queue.dropped - dropped),
            "queue/waited": sum(now - group.since for group in groups) / len(groups),
            **filtered,
        }
        self._order.log({"groups": [_line(group) for group in groups]}, step + 1)
        output, scores = join([group.output for group in groups]), join([group.scores for group in groups])
        output.meta_info["timing"] = {"images": drawing / self.draws.num_servers}
        names, version = tuple(group.name for group in groups), min(group.version for group in groups)
        return self.draws.experience(names, version, step, output, lambda: scores)

    def metrics(self, batch: DataProto) -> dict[str, float]:
        return super().metrics(batch) | self._told

    def settle(self) -> None:
        """The servers finish what they draw, and begin nothing before the next experience is asked for."""
        wait_for(self._hold())

    def data_state(self) -> dict[str, Any]:
        """Groups that are under way will be drawn anew: a run goes on at the first step with a group to be trained."""
        first, groups = wait_for(self._queue_state())
        return (self._before.get(first) or super().data_state()) | ({"groups": groups} if groups else {})

    def close(self) -> None:
        wait_for(self._end())
        self._order.finish()

    # ---- the event loop ------------------------------------------------------------------------------

    async def _start(self) -> None:
        for server in range(len(self._turns)):
            self._spawn(self._serve(server))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failure = self._failure or error  # the first one is told
            self._arrived.set()

    async def _queue_state(self) -> tuple[int, dict[str, Any] | None]:
        return self.queue.first, self.queue.state()

    async def _take(self, weights: Weights, steps: range) -> tuple[list[Group], float, dict[str, float]]:
        """From now on servers draw with these weights, and the groups of these steps too.

        (the next batch, seconds that servers have drawn since the one before, what the filter says of it); no batch
        where groups of more steps have to be drawn first.
        """
        if self._failure is not None:  # said at once, not only where a batch is missing
            raise self._failure
        self.weights = weights
        for number in steps:
            self.queue.open(number)
        if self._settled:
            self._settled = False
            for turn in self._turns:
                turn.release()
        while not (groups := self.queue.take(weights.version)):
            self._arrived.clear()
            if self._failure is not None:
                raise self._failure
            if self.queue.horizon(weights.version) >= self.opened:
                return [], 0.0, {}
            await self._arrived.wait()
        return groups, self._busy.take(), self._filtered(groups)

    def _filtered(self, groups: list[Group]) -> dict[str, float]:
        if self.filter is None:
            return {}
        return self.filter.tell(self.run.step + 1, sum(not group.teaches for group in groups), len(groups))

    async def _hold(self) -> None:
        if self._settled:
            if self._failure is not None:
                raise self._failure
            return
        for turn in self._turns:
            await turn.acquire()
        self._settled = True
        if self._failure is not None:
            raise self._failure

    async def _end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, server: int) -> None:
        """One draw after the other, each with the newest weights."""
        while True:
            numbers = await self.queue.to_draw.get()
            async with self._turns[server]:
                await self._draw(server, numbers)

    async def _draw(self, server: int, numbers: tuple[int, ...]) -> None:
        """Groups of one step at once; returns when their images are there."""
        step = self.queue.place(numbers[0])[0]
        among = [self.queue.place(number)[1] for number in numbers]
        version, groups = await self.draws.draw_groups(
            server, self._rows[step][among], step, among, newest=lambda: self.weights, learns=not self.overlaps
        )
        start = perf_counter()
        self._busy.begin(server)
        await asyncio.gather(
            *(
                self._group(number, version, numbers, group)
                for number, group in zip(numbers, groups, strict=True)
            )
        )
        self._busy.end(server)
        self.draws.timeline.add(f"rollout {server}", "drawing", start, perf_counter())

    async def _group(self, number: int, version: int, numbers: tuple[int, ...], group: DrawnGroup) -> None:
        """Until its images are there; its rewards come in later."""
        output, scores = await group.drawing

        async def score() -> None:
            start = perf_counter()
            result = await asyncio.to_thread(self.draws.scored_rows, group.rows, await scores)
            self.draws.timeline.add("rewards", "scoring", start, perf_counter())
            teaches = self.filter is None or self.filter.teaches(result)
            before = self.queue.passed_over
            self.queue.enter(Group(number, version, numbers, group.name, output, result, teaches))
            if self.filter is not None:
                self.filter.see(result, dropped=self.queue.passed_over > before)
            self._arrived.set()

        self._spawn(score())


def _line(group: Group) -> dict[str, Any]:
    """What `order.jsonl` says of a group; `prompt` is its place in the data set."""
    columns = group.scores.non_tensor_batch
    return {
        "group": group.number,
        "prompt": int(columns["index"][0]) if "index" in columns else None,
        "uid": columns["uid"][0],
        "version": group.version,
        "drawn_with": list(group.drawn_with),
    }
