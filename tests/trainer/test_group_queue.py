"""Which groups may be drawn when, what is trained in which order, and what a run that goes on has still to train."""

import random

import pytest

from verl_omni.report.tracking import JsonLines
from verl_omni.trainer.diffusion.group_queue import Group, GroupQueue
from verl_omni.trainer.diffusion.replay import ORDER, RecordedQueue, check_replay

B = 3


def scored(number: int, version: int, *drawn_with: int) -> Group:
    return Group(number, version, drawn_with or (number,), f"e{number}", None, None)


def waiting(queue: GroupQueue) -> list[tuple[int, ...]]:
    return [queue.to_draw.get_nowait() for _ in range(queue.to_draw.qsize())]


class Simulation:
    """Servers and rewards that finish in an order of their own; every group that was under way is looked at."""

    def __init__(self, queue: GroupQueue, seed: int, overtaking: bool, version: int = 0):
        self.queue, self.random, self.overtaking = queue, random.Random(seed), overtaking
        self.version, self.opened = version, queue.first
        self.drawing: list[Group] = []
        self.trained: list[list[Group]] = []
        self.most = 0

    def step(self) -> None:
        while self.opened <= self.queue.horizon(self.version):
            self.queue.open(self.opened)
            self.opened += 1
        # While the step before was learned from, servers went on; how far, nobody knows.
        for _ in range(self.random.randrange(4 * B)):
            self._something_happens()
        while not (taken := self.queue.take(self.version)):
            self._something_happens()
        self.trained.append(taken)
        under_way = self.queue.to_draw.qsize() * self.queue.at_once + len(self.drawing) + len(self.queue.scored)
        self.most = max(self.most, under_way + len(taken))
        self.version += 1

    def _something_happens(self) -> None:
        if self.queue.to_draw.qsize() and self.random.random() < 0.5:
            draw = self.queue.to_draw.get_nowait()
            self.drawing += [scored(number, self.version, *draw) for number in draw]
        elif self.drawing:
            self.queue.enter(self.drawing.pop(self.random.randrange(len(self.drawing)) if self.overtaking else 0))

    def run(self, until: int) -> "Simulation":
        while self.version < until:
            self.step()
        return self

    @property
    def behind(self) -> int:
        first = self.version - len(self.trained)
        return max(first + i - group.version for i, groups in enumerate(self.trained) for group in groups)

    @property
    def numbers(self) -> list[int]:
        return [group.number for groups in self.trained for group in groups]


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("at_once", [1, 3])
def test_nothing_is_older_than_allowed_where_nothing_overtakes(max_staleness, at_once):
    """By construction: none is dropped, and no more is under way than (max_staleness + 1) batches."""
    for seed in range(20):
        done = Simulation(GroupQueue(B, 12, at_once, max_staleness), seed, overtaking=False).run(until=12)
        assert done.behind <= max_staleness and done.queue.dropped == 0
        assert done.most <= (max_staleness + 1) * B
        assert done.numbers == list(range(12 * B))


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_what_overtaking_makes_too_old_is_dropped_and_drawn_anew(max_staleness):
    dropped = 0
    for seed in range(20):
        done = Simulation(GroupQueue(B, 12, 1, max_staleness), seed, overtaking=True).run(until=12)
        assert done.behind <= max_staleness and done.most <= (max_staleness + 1) * B
        assert sorted(done.numbers) == list(range(12 * B))  # every one, none of them twice
        dropped += done.queue.dropped
    assert (dropped > 0) == (max_staleness > 0)


def test_or_it_is_kept():
    runs = [Simulation(GroupQueue(B, 12, 1, 1, keep_stale=True), seed, True).run(until=12) for seed in range(20)]
    assert all(sorted(run.numbers) == list(range(12 * B)) and run.queue.dropped == 0 for run in runs)
    assert max(run.behind for run in runs) > 1


def test_groups_are_taken_as_they_come_in_and_handed_over_by_number():
    queue = GroupQueue(2, 9, at_once=2, max_staleness=1)
    queue.open(0)
    queue.open(1)
    assert waiting(queue) == [(0, 1), (2, 3)]
    for number in (3, 1):
        queue.enter(scored(number, 0))
    queue.enter(scored(0, 0))
    assert [group.number for group in queue.take(0)] == [1, 3]
    assert queue.take(1) == [] and [group.number for group in queue.scored] == [0]


def test_what_was_dropped_is_drawn_before_what_comes_later():
    queue = GroupQueue(1, 9, max_staleness=1)
    queue.enter(scored(4, 0))
    queue.open(5)
    assert queue.take(2) == [] and queue.dropped == 1
    assert waiting(queue) == [(4,), (5,)]


@pytest.mark.parametrize("done", range(1, 8))
def test_a_run_that_goes_on_trains_exactly_what_is_left(done):
    for seed in range(10):
        before = Simulation(GroupQueue(B, 8, 2, 2), seed, overtaking=True).run(until=done)
        state = before.queue.state() or {"first": done}
        assert state["first"] * B + len(state.get("trained", ())) == done * B
        after = Simulation(GroupQueue(B, 8, 2, 2, **state), seed, overtaking=True, version=done).run(until=8)
        assert sorted(before.numbers + after.numbers) == list(range(8 * B))
        assert min(group.version for groups in after.trained for group in groups) >= done  # all of it drawn anew


def record(folder, trained: list[list[Group]]) -> None:
    lines = JsonLines(folder / ORDER)
    for step, groups in enumerate(trained, start=1):
        told = [{"group": g.number, "version": g.version, "drawn_with": list(g.drawn_with)} for g in groups]
        lines.log({"groups": told}, step)
    lines.finish()


@pytest.mark.parametrize("steps", [3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_a_recorded_order_is_taken_again(tmp_path, seed, steps):
    """All or the first steps of it, whatever comes in when: the same groups, versions and companions in drawing."""
    first = Simulation(GroupQueue(B, 8, 2, 2), seed, overtaking=True).run(until=8)
    record(tmp_path, first.trained)
    again = Simulation(RecordedQueue(B, steps, tmp_path), seed + 100, overtaking=True).run(until=steps)
    told = [[[(g.number, g.version, g.drawn_with) for g in step] for step in run.trained] for run in (first, again)]
    assert told[0][:steps] == told[1]
    assert first.queue.dropped and not again.queue.scored


def test_a_folder_that_cannot_be_replayed(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no order.jsonl; give the folder of a fully_async run"):
        check_replay(str(tmp_path), "own", 3, B)
    record(tmp_path, [[scored(0, 0), scored(1, 0), scored(2, 0)]])
    with pytest.raises(ValueError, match="has 1 steps and this run 3: set trainer.total_training_steps=1 or less"):
        check_replay(str(tmp_path), "own", 3, B)
    with pytest.raises(ValueError, match="took 3 prompts a step: set data.train_batch_size=3"):
        check_replay(str(tmp_path), "own", 1, 4)
    check_replay(str(tmp_path), "own", 1, B)
    with pytest.raises(ValueError, match="is the folder of this run itself"):
        check_replay(str(tmp_path), f"{tmp_path}/x/..", 1, B)
    (tmp_path / ORDER).write_text('{"step": 4, "data": {"groups": []}}\n')
    with pytest.raises(ValueError, match="does not begin at step 1"):
        check_replay(str(tmp_path), "own", 1, B)
