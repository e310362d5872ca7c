"""Forwards go to the server with the least to do, each as a whole, and to another one where a server has died."""

import asyncio

import pytest
from ray.exceptions import ActorUnavailableError
from test_agent_loop import Remote, batch

from verl_omni.agent_loop.manager import assign
from verl_omni.agent_loop.routing import AHEAD, Router, blocks_of
from verl_omni.agent_loop.sample_engine import SampleEngine

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
