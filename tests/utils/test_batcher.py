"""Single calls become batches, the same ones whatever the order of arrival, and nobody waits for ever."""

import asyncio
import itertools
import random

import pytest

from verl_omni.utils.batcher import Batcher

GUARD = 30  # seconds after which something waits for ever


class Work:
    """Doubles numbers and remembers its batches."""

    def __init__(self, error: BaseException | None = None):
        self.batches, self.error = [], error

    def __call__(self, items):
        self.batches.append(items)
        if self.error:
            raise self.error
        return [2 * item for item in items]


def run(batcher: Batcher, calls: list[dict], return_exceptions: bool = False) -> list:
    """Submit all calls at once, in this order."""

    async def together():
        tasks = [batcher.submit(**call) for call in calls]
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=return_exceptions), GUARD)

    return asyncio.run(together())


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_a_burst_gives_the_same_batches_in_any_order(order):
    work = Work()
    calls = [{"item": i, "position": (i, 5)} for i in order]
    assert run(Batcher(work, 2, max_wait_s=1e9), calls) == [2 * i for i in order]
    assert sorted(work.batches) == [[0, 1], [2, 3], [4]]


def test_calls_that_come_one_by_one_wait_for_their_block():
    work = Work()
    batcher = Batcher(work, 3, max_wait_s=0.0)

    async def staggered():
        tasks = []
        for i in random.Random(0).sample(range(7), 7):
            tasks.append(asyncio.create_task(batcher.submit(i, position=(i, 7))))
            await asyncio.sleep(0.005)
        return await asyncio.wait_for(asyncio.gather(*tasks), GUARD)

    asyncio.run(staggered())
    assert sorted(work.batches) == [[0, 1, 2], [3, 4, 5], [6]]


def test_bursts_of_different_keys_do_not_mix():
    work = Work()
    calls = [{"item": 10 * k + i, "key": k, "position": (i, 3)} for i in range(3) for k in (1, 2)]
    run(Batcher(work, 2, 1e9), calls)
    assert sorted(work.batches) == [[10, 11], [12], [20, 21], [22]]


def test_two_bursts_at_once_are_both_served():
    work = Work()
    calls = [{"item": 100 * burst + i, "position": (i, 3)} for burst in range(2) for i in range(3)]
    assert run(Batcher(work, 4, 1e9), calls) == [2 * c["item"] for c in calls]
    assert sorted(len(b) for b in work.batches) == [3, 3]


def test_loose_calls_are_batched_by_a_short_wait():
    work = Work()
    assert run(Batcher(work, 4, 0.01), [{"item": i, "key": i % 2} for i in range(10)]) == [2 * i for i in range(10)]
    assert sorted(work.batches) == [[0, 2, 4, 6], [1, 3, 5, 7], [8], [9]]


def test_loose_calls_are_served_while_a_burst_is_incomplete():
    batcher = Batcher(Work(), 2, 0.01)

    async def mixed():
        first = asyncio.create_task(batcher.submit(1, position=(0, 2)))
        assert await asyncio.wait_for(batcher.submit(5), GUARD) == 10
        assert not first.done()
        assert await asyncio.wait_for(batcher.submit(2, position=(1, 2)), GUARD) == 4
        return await first

    assert asyncio.run(mixed()) == 2


def test_an_exception_reaches_every_caller_and_the_next_batch_runs():
    work = Work(error=KeyError("boom"))
    batcher = Batcher(work, 3, 0.01)
    results = run(batcher, [{"item": i, "position": (i, 3)} for i in range(3)], return_exceptions=True)
    assert [type(r) for r in results] == [KeyError] * 3
    work.error = None
    assert run(batcher, [{"item": 4}]) == [8]


def test_a_wrong_number_of_results_is_an_error_of_every_caller():
    results = run(Batcher(lambda items: [1], 3, 0.01), [{"item": i} for i in range(3)], return_exceptions=True)
    assert ["a batch of 3 gave 1 results" in str(r) for r in results] == [True] * 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_if_the_loop_itself_breaks_nobody_waits(monkeypatch):
    batcher = Batcher(Work(), 2, 0.01)
    monkeypatch.setattr(batcher, "_take", lambda batch: 1 / 0)
    results = run(batcher, [{"item": i, "position": (i, 5)} for i in range(3)], return_exceptions=True)
    assert ["ZeroDivisionError" in str(r) for r in results] == [True] * 3
    monkeypatch.undo()
    assert run(batcher, [{"item": 1}]) == [2]


class Fatal(BaseException):
    """Not an Exception: the pump does not survive it."""


def test_a_fatal_error_in_the_work_fails_those_that_run_and_those_that_wait():
    results = run(Batcher(Work(error=Fatal("bye")), 2, 0.01), [{"item": i} for i in range(5)], return_exceptions=True)
    assert ["Fatal: bye" in str(r) for r in results] == [True] * 5


def test_a_caller_that_goes_away_does_not_disturb_the_others():
    batcher = Batcher(Work(), 3, 0.01)

    async def leave():
        tasks = [asyncio.create_task(batcher.submit(i, position=(i, 3))) for i in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        last = await asyncio.wait_for(batcher.submit(2, position=(2, 3)), GUARD)
        return [await tasks[1], last]

    assert asyncio.run(leave()) == [2, 4]


@pytest.mark.parametrize("burst", [True, False], ids=["blocks", "loose calls"])
def test_guests_have_every_second_batch_at_most(burst):
    """Three guests come first, and three blocks (or loose batches) of two others after them."""
    work = Work()
    guests = [{"item": 100 + i, "position": (0, 1, f"guest {i}"), "guest": True} for i in range(3)]
    others = [{"item": i, **({"position": (i, 6)} if burst else {})} for i in range(6)]
    assert run(Batcher(work, 2, 1e9), [*guests, *others]) == [2 * call["item"] for call in [*guests, *others]]
    assert work.batches == [[100], [0, 1], [101], [2, 3], [102], [4, 5]]


def test_a_guest_that_has_gone_before_its_turn_is_forgotten():
    work = Work()
    batcher = Batcher(work, 2, 0.01)

    async def leave():
        waiting = [asyncio.create_task(batcher.submit(i, position=(i, 2, "guest"), guest=True)) for i in range(2)]
        await asyncio.sleep(0)
        for one in waiting:
            one.cancel()
        return await asyncio.wait_for(batcher.submit(7), GUARD)

    assert asyncio.run(leave()) == 14
    assert work.batches == [[7]]


def test_a_call_that_is_taken_back_is_not_worked_on_and_its_block_goes_on():
    work = Work()
    batcher = Batcher(work, 3, max_wait_s=1e9)

    async def block():
        first = asyncio.create_task(batcher.submit(0, position=(0, 3)))
        second = asyncio.create_task(batcher.submit(1, position=(1, 3)))
        await asyncio.sleep(0)
        assert batcher.waiting == 2
        first.cancel()
        third = asyncio.create_task(batcher.submit(2, position=(2, 3)))
        return await asyncio.wait_for(asyncio.gather(second, third), GUARD)

    assert asyncio.run(block()) == [2, 4]
    assert work.batches == [[1, 2]]


def test_a_burst_that_all_have_left_leaves_nothing_behind():
    """The next burst of the same key is as long as it says."""
    work = Work()
    batcher = Batcher(work, 2, max_wait_s=1e9)

    async def twice():
        gone = asyncio.create_task(batcher.submit(0, position=(0, 1)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0.01)
        assert not batcher._withdrawn
        return await asyncio.wait_for(batcher.submit(7, position=(0, 1)), GUARD)

    assert asyncio.run(twice()) == 14
    assert work.batches == [[7]]


def test_loose_calls_that_have_gone_are_not_worked_on():
    work = Work()
    batcher = Batcher(work, 8, max_wait_s=0.2)

    async def leave():
        gone, stays = (asyncio.create_task(batcher.submit(i)) for i in (1, 2))
        await asyncio.sleep(0.02)
        gone.cancel()
        return await asyncio.wait_for(stays, GUARD)

    assert asyncio.run(leave()) == 4
    assert work.batches == [[2]]


def test_a_place_that_is_taken_after_all_is_taken():
    work = Work()
    batcher = Batcher(work, 2, max_wait_s=1e9)

    async def again():
        gone = asyncio.create_task(batcher.submit(0, position=(0, 2, "burst")))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0.01)
        calls = [batcher.submit(i, position=(i, 2, "burst")) for i in range(2)]
        return await asyncio.wait_for(asyncio.gather(*calls), GUARD)

    assert asyncio.run(again()) == [0, 2]
    assert work.batches == [[0, 1]]


def test_a_place_that_is_given_back_by_mistake_is_drawn_all_the_same():
    """Its caller heard nothing and asked elsewhere, but its call had come."""
    work = Work()
    batcher = Batcher(work, 2, max_wait_s=1e9)

    async def both():
        first = asyncio.create_task(batcher.submit(0, position=(0, 2, "burst")))
        await asyncio.sleep(0)
        batcher.withdraw((0, 2, "burst"))
        second = batcher.submit(1, position=(1, 2, "burst"))
        return await asyncio.wait_for(asyncio.gather(first, second), GUARD)

    assert asyncio.run(both()) == [0, 2]
    assert work.batches == [[0, 1]] and not batcher._withdrawn


def test_guests_are_not_counted_among_those_who_wait():
    batcher = Batcher(Work(), 2, max_wait_s=1e9)

    async def count():
        calls = [
            asyncio.create_task(batcher.submit(i, position=(0, 2, str(i)), guest=guest))
            for i, guest in enumerate((True, False))
        ]
        await asyncio.sleep(0)
        found = batcher.waiting
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        return found

    assert asyncio.run(count()) == 1
