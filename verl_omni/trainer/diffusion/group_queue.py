"""Groups of samples on their way from prompts to updates, where drawing and learning do not wait for each other.

A group is all samples of one prompt. Groups are numbered in the order of the prompts, `data.train_batch_size` = B to a
training step: group g belongs to step g // B, whose seeds it has. It is trained when it has been scored, with whatever
step is next: in the order in which groups come in, not in that of their numbers.

The groups of step k may be drawn once the weights have seen k - `max_staleness` training steps. So no more than
(max_staleness + 1) * B groups are under way (waiting to be drawn, being drawn, being scored, scored, being learned
from), and as long as none overtakes another, none is older than `max_staleness` steps when it is trained.
"""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from verl.protocol import DataProto


@dataclass(eq=False)
class Group:
    """A scored group: what was drawn of it, by weights of which version, at once with which others."""

    number: int
    version: int
    drawn_with: tuple[int, ...]
    name: str  # of its trajectories
    output: DataProto
    scores: DataProto
    teaches: bool = True  # its rewards differ
    since: float = field(default_factory=perf_counter)  # when it was scored


class GroupQueue:
    """Which groups are to be drawn, which are scored, and which have been trained. It draws nothing itself."""

    def __init__(
        self,
        batch_size: int,
        steps: int,
        at_once: int = 1,
        max_staleness: int = 0,
        keep_stale: bool = False,
        first: int = 0,
        trained: Iterable[int] = (),
        done: int | None = None,
        spare: int = 0,
    ):
        """For a run of so many `steps`; `at_once` groups are drawn together.

        What is further behind than `max_staleness` is dropped, unless stale ones are to be kept. The run goes on at
        step `first`; `trained` are the groups of that step and later ones which it has trained. `done` training steps
        lie behind it. Of the groups that teach nothing, `spare` are passed over for each batch.
        """
        self.batch_size, self.steps, self.at_once = batch_size, steps, at_once
        self.max_staleness, self.keep_stale = max_staleness, keep_stale
        self.first, self.trained = first, set(trained)
        self.to_draw: asyncio.PriorityQueue[tuple[int, ...]] = asyncio.PriorityQueue()  # the lowest numbers first
        self.scored: list[Group] = []
        self.dropped = 0
        self.spare = self._left = spare
        self.passed_over = 0 if done is None else (self.first - done) * batch_size + len(self.trained)

    def horizon(self, version: int) -> int:
        """The last step whose groups may be drawn, with weights of this version."""
        return min(version + self.max_staleness, self.steps - 1) + math.ceil(self.passed_over / self.batch_size)

    def open(self, step: int) -> None:
        """The groups of a step may be drawn from now on, but for those that have been trained."""
        numbers = range(step * self.batch_size, (step + 1) * self.batch_size)
        left = [number for number in numbers if number not in self.trained]
        for start in range(0, len(left), self.at_once):
            self.to_draw.put_nowait(tuple(left[start : start + self.at_once]))

    def place(self, number: int) -> tuple[int, int]:
        """(the step that a group belongs to, its number among the groups of that step)."""
        return divmod(number, self.batch_size)

    def enter(self, group: Group) -> None:
        """It has been scored. One that teaches nothing counts as trained, and a later one will be in its place."""
        if group.teaches or not self._left:
            self.scored.append(group)
            return
        self._left -= 1
        self.passed_over += 1
        self._finish([group])

    def take(self, version: int) -> list[Group]:
        """A batch for the weights of this version, by number; nothing as long as too few groups are there.

        What is too old is dropped and will be drawn anew, with the same seeds, by the weights of that time: every
        prompt is trained as often as it would be in turn.
        """
        if not self.keep_stale:
            stale = [group for group in self.scored if version - group.version > self.max_staleness]
            self.scored = [group for group in self.scored if group not in stale]
            self.dropped += len(stale)
            for group in stale:
                self.to_draw.put_nowait((group.number,))
        if len(self.scored) < self.batch_size:
            return []
        return self._train(self.scored[: self.batch_size])

    def _train(self, taken: list[Group]) -> list[Group]:
        """Of steps that are trained as a whole, only how many there are is remembered."""
        self.scored = [group for group in self.scored if group not in taken]
        self._left = self.spare
        self._finish(taken)
        return sorted(taken, key=lambda group: group.number)

    def _finish(self, groups: list[Group]) -> None:
        self.trained |= {group.number for group in groups}
        while (whole := set(range(self.first * self.batch_size, (self.first + 1) * self.batch_size))) <= self.trained:
            self.trained -= whole
            self.first += 1

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint: `first` and `trained`. None where the groups trained are those of the first steps."""
        return {"first": self.first, "trained": sorted(self.trained)} if self.trained or self.passed_over else None
