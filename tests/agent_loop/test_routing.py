"""Forwards go to the server with the least to do, each as a whole, and to another one where a server has died."""

import asyncio

import pytest
from ray.exceptions import ActorUnavailableError
from test_agent_loop import Remote, batch

from verl_omni.agent_loop.manager import assign, chunked
from verl_omni.agent_loop.routing import AHEAD, Router, blocks_of
from verl_omni.agent_loop.sample_engine import SampleEngine
from verl_omni.utils.batcher import Batcher

GUARD = 30


def rows(samples: int, servers: int, max_num_seqs: int) -> list[dict]:
    data = batch(["a"] * samples)
    assign(data, servers, 1, max_num_seqs, "name")
    return [{key: values[i] for key, values in data.non_tensor_batch.items()} for i in range(samples)]


def answered(blocks: list, server: int, samples: int) -> None:
    """The next ones that this server draws."""
    mine = [b for b in blocks if b.placed.is_set() and b.server == server and b.left]
    for block in mine[:samples]:
        block.answered()


def drawn_by(blocks: list) -> list[int | None]:
    return [block.server if block.placed.is_set() else None for block in blocks]


@pytest.mark.parametrize("samples", [6, 24, 40])
def test_equal_servers_draw_equal_shares(samples):
    """As if they had been dealt at once: server 0 the first half, server 1 the other."""
    blocks = blocks_of(rows(samples, 2, 4), 2, 4, free=True)
    while any(block.left for block in blocks):
        for server in (0, 1):
            answered(blocks, server, 4)
    assert drawn_by(blocks) == [0] * (samples // 2) + [1] * (samples // 2)


def test_a_slow_server_gets_less():
    """It draws its first forward while the other draws all that does not wait here already."""
    blocks = blocks_of(rows(40, 2, 4), 2, 4, free=True)
    for _ in range(20):
        answered(blocks, 1, 4)
    by = drawn_by(blocks)
    assert by.count(0) == 4 * AHEAD and by.count(1) == 40 - 4 * AHEAD
    for start in range(0, 40, 4):
        assert len(set(by[start : start + 4])) == 1, "a forward stays together"


def test_no_server_has_more_than_two_forwards_before_it():
    router = blocks_of(rows(400, 2, 4), 2, 4, free=True)[0].router
    assert router.load == [AHEAD * 4] * 2
    alone = Router(1, 4)
    assert drawn_by([first := blocks_of(rows(9, 1, 9), 1, 9, free=True)[0]]) == [0]
    alone.add(first)
    assert alone.load == [9], "a forward that is larger than the bound is drawn all the same"


def test_others_parts_of_a_forward_decide_where_it_is_drawn():
    """Two processes ask for a part each: both know its own server, and nothing of each other."""
    first, second = rows(8, 2, 4)[:2], rows(8, 2, 4)[2:]
    blocks = blocks_of(first, 2, 4, free=True) + blocks_of(second, 2, 4, free=True)
    assert drawn_by(blocks) == [0] * 4 + [1] * 4
    assert [block.router is None for block in blocks] == [True] * 4 + [False] * 4


def test_samples_stay_where_they_are_asked_for():
    blocks = blocks_of(rows(400, 2, 4), 2, 4, free=False)
    assert drawn_by(blocks) == [0] * 200 + [1] * 200
    assert not blocks[0].elsewhere(0), "its trajectory has to lie there"


def test_what_a_dead_server_had_is_drawn_by_others():
    blocks = blocks_of(rows(24, 3, 4), 3, 4, free=True)
    answered(blocks, 0, 3)
    assert all(block.elsewhere(0) for block in blocks if block.server == 0)
    assert 0 not in drawn_by(blocks)[3:]
    for _ in range(24):
        answered(blocks, 1, 1)
        answered(blocks, 2, 1)
    assert not any(block.left for block in blocks)
    assert blocks[0].router.load == [0, 0, 0]


def test_where_all_have_died_one_waits_for_its_own():
    blocks = blocks_of(rows(8, 2, 4), 2, 4, free=True)
    assert blocks[0].elsewhere(0) and blocks[0].server == 1
    assert not blocks[0].elsewhere(1) and not blocks[4].elsewhere(1)


def test_a_sample_is_asked_of_another_server_and_keeps_its_seed():
    asked = []

    def server(number: int) -> Remote:
        async def generate(*, sampling_params, request_id):
            asked.append((number, sampling_params["seed"], sampling_params.get("position")))
            if number == 0:
                raise ActorUnavailableError("away", b"0" * 16)
            return f"drawn by {number}"

        return Remote(generate=generate)

    mine = rows(4, 2, 2)
    blocks = blocks_of(mine, 2, 2, free=True)
    engine = SampleEngine([server(0), server(1)], blocks[0], {"position": mine[0]["position"]})
    call = engine.generate.remote(sampling_params={"seed": 11}, request_id="one")
    assert asyncio.run(asyncio.wait_for(call, GUARD)) == "drawn by 1"
    assert asked == [(0, 11, mine[0]["position"]), (1, 11, None)]


class Waiting:
    """A server that answers blocks of two, or samples without a place; its calls fail once it is dead."""

    def __init__(self):
        self.batcher, self.dead, self.deaths = Batcher(lambda items: items, 2, 0.01), False, asyncio.Event()
        self.remote = Remote(generate=self.generate, withdraw=self.withdraw, abort=self.aborted)
        self.aborts = []

    async def generate(self, *, sampling_params, request_id):
        call = asyncio.ensure_future(self.batcher.submit(request_id, position=sampling_params.get("position")))
        death = asyncio.ensure_future(self.deaths.wait())
        await asyncio.wait([call, death], return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if self.dead:
            call.cancel()
            raise ActorUnavailableError("away", b"0" * 16)
        return await call

    async def withdraw(self, position):
        if self.dead:
            raise ActorUnavailableError("away", b"0" * 16)
        self.batcher.withdraw(position)

    async def aborted(self, request_id):
        self.aborts.append(request_id)

    def die(self):
        self.dead = True
        self.deaths.set()


def samples(servers: list[Waiting], count: int, max_num_seqs: int = 2) -> list[SampleEngine]:
    mine = rows(count, len(servers), max_num_seqs)
    blocks = blocks_of(mine, len(servers), max_num_seqs, free=True)
    return [
        SampleEngine([s.remote for s in servers], b, {"position": row["position"]})
        for b, row in zip(blocks, mine, strict=True)
    ]


async def ask(engine: SampleEngine, name: str):
    return await asyncio.wait_for(engine.generate.remote(sampling_params={}, request_id=name), GUARD)


def test_a_sample_that_asks_late_does_not_wait_for_those_who_were_answered_elsewhere():
    async def late():
        servers = [Waiting(), Waiting()]
        early, slow = samples(servers, 4)[:2]
        first = asyncio.create_task(ask(early, "early"))
        await asyncio.sleep(0.01)
        servers[0].die()
        return [await first, await ask(slow, "slow")]

    assert asyncio.run(late()) == ["early", "slow"]


@pytest.mark.parametrize("times", [1, 3])
def test_samples_whose_first_request_is_given_up_do_not_take_a_place_for_ever(times):
    """Their loops ask again, without one. With one server, six forwards are dealt two at a time."""

    async def impatient(engine, name):
        for _ in range(times):
            call = asyncio.create_task(engine.generate.remote(sampling_params={}, request_id=name))
            await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.wait([call])
        return await ask(engine, name)

    async def all_of_them():
        server = Waiting()
        engines = samples([server], 12)
        even = [impatient(engine, str(i)) for i, engine in enumerate(engines) if i % 2 == 0]
        odd = [ask(engine, str(i)) for i, engine in enumerate(engines) if i % 2]
        answers = await asyncio.wait_for(asyncio.gather(*even, *odd), GUARD)
        assert engines[0].block.router.load == [0]
        return answers

    assert sorted(map(int, asyncio.run(all_of_them()))) == list(range(12))


def test_loops_that_wait_for_each_other_before_they_ask():
    async def meeting():
        server, here, all_here = Waiting(), [], asyncio.Event()
        engines = samples([server], 12)

        async def loop(engine, name):
            here.append(name)
            if len(here) == 12:
                all_here.set()
            await all_here.wait()
            return await ask(engine, name)

        loops = [loop(engine, str(i)) for i, engine in enumerate(engines)]
        return await asyncio.wait_for(asyncio.gather(*loops), GUARD)

    assert len(asyncio.run(meeting())) == 12


def test_samples_that_never_ask_leave_room_for_others():
    async def leaving():
        server = Waiting()
        engines = samples([server], 12)

        async def loop(engine, number):
            answer = await ask(engine, str(number)) if number % 4 == 1 else None
            await engine.leave()
            return answer

        found = await asyncio.wait_for(asyncio.gather(*(loop(e, i) for i, e in enumerate(engines))), GUARD)
        assert engines[0].block.router.load == [0]
        return [answer for answer in found if answer is not None]

    assert asyncio.run(leaving()) == ["1", "5", "9"]


@pytest.mark.parametrize(
    ("workers", "whole", "sizes"), [(2, True, [8, 4]), (2, False, [6, 6]), (8, True, [2, 2, 2, 2] + [1] * 4)]
)
def test_workers_have_whole_forwards_if_there_are_enough(workers, whole, sizes):
    data = batch(["a"] * 12)
    assign(data, 1, 1, 4, "name")
    found = chunked(data, workers, whole)
    assert [len(chunk) for chunk in found] == sizes
    assert sorted(row for chunk in found for row in chunk) == list(range(12))


def test_a_sample_that_nobody_waits_for_is_taken_back():
    aborted = []

    async def generate(**request):
        await asyncio.Event().wait()

    async def abort(request_id):
        aborted.append(request_id)

    engine = SampleEngine([Remote(generate=generate, abort=abort)], blocks_of(rows(1, 1, 1), 1, 1, True)[0], {})

    async def cancelled():
        task = asyncio.create_task(engine.generate.remote(sampling_params={}, request_id="one"))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task], timeout=GUARD)
        return task.cancelled()

    assert asyncio.run(cancelled())
    assert aborted == ["one"]
