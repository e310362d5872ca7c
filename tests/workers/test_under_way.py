"""A request that is taken back by its name: it returns, now, and leaves nothing behind."""

import asyncio

import pytest
from composed import composed

from verl_omni.utils.errors import QueueFull, RequestAborted
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.server import RolloutServer
from verl_omni.workers.rollout.under_way import UnderWay

GUARD = 30


def test_only_the_one_that_is_named_ends():
    under_way, left = UnderWay(), []

    async def ask():
        go_on = asyncio.Event()

        async def work(answer):
            await go_on.wait()
            return answer

        calls = [asyncio.create_task(under_way.answer(n, work(n), lambda n=n: left.append(n))) for n in ("a", "b")]
        await asyncio.sleep(0)
        assert under_way.abort("a") and not under_way.abort("c")
        with pytest.raises(RequestAborted, match="request a was aborted"):
            await asyncio.wait_for(calls[0], GUARD)
        assert not under_way.abort("a"), "it has gone"
        go_on.set()
        assert await asyncio.wait_for(calls[1], GUARD) == "b"
        assert under_way.abort_all() == [] and left == ["a"]

    asyncio.run(ask())


def test_who_goes_away_takes_the_work_along():
    under_way, ended = UnderWay(), []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def ask():
        call = asyncio.create_task(under_way.answer("a", work(), gone=lambda: ended.append("gone")))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call], timeout=GUARD)
        await asyncio.sleep(0.01)
        assert call.cancelled() and ended == [True, "gone"]

    asyncio.run(ask())


class Engine:
    """Draws when it is told to."""

    version = 1

    def __init__(self):
        from verl_omni.utils.batcher import Batcher

        self.batcher = Batcher(lambda items: [RolloutOutput(str(item)) for item in items], 4, 1e9)

    def give_back(self, sampling_params):
        if sampling_params.get("position"):
            self.batcher.withdraw(sampling_params["position"])

    async def generate(self, sampling_params, request_id, **_):
        return await self.batcher.submit(request_id, position=sampling_params.get("position"))


class Server(RolloutServer):
    def load(self, device):
        return Engine()


@pytest.fixture
def server(monkeypatch):
    """Its forwards have up to four samples, and its queue three places."""
    monkeypatch.setattr(RolloutServer.__module__ + ".WAITING_BATCHES", 3 / 4)
    return Server(composed("trainer.mode=separate", "actor_rollout_ref.rollout.max_num_seqs=4"))


async def waiting(server: Server, count: int, **params) -> list[asyncio.Task]:
    await server.start()
    asked = [server.generate(sampling_params=dict(params), request_id=str(i)) for i in range(count)]
    tasks = [asyncio.create_task(one) for one in asked]
    await asyncio.sleep(0.05)
    return tasks


def test_a_request_is_aborted_even_before_there_are_weights(server):
    async def ask():
        (call,) = await waiting(server, 1)
        assert await server.abort("0")
        with pytest.raises(RequestAborted):
            await asyncio.wait_for(call, GUARD)

    asyncio.run(ask())


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_others_of_a_forward_do_not_wait_for_one_that_was_aborted(server, steps):
    """Whether it had begun, waited for weights, or for the others."""

    async def ask():
        await server.start()
        if steps == 5:
            server._has_weights.set()
        params = [{"position": (i, 2, "run")} for i in range(2)]
        first = asyncio.create_task(server.generate(sampling_params=params[0], request_id="0"))
        await asyncio.sleep(0)  # it has been asked for, and its work is not entered
        for _ in range(steps):
            await asyncio.sleep(0)
        assert await server.abort("0")
        with pytest.raises(RequestAborted):
            await asyncio.wait_for(first, GUARD)
        server._has_weights.set()
        second = server.generate(sampling_params=params[1], request_id="1")
        assert (await asyncio.wait_for(second, GUARD)).response == "1"

    asyncio.run(ask())


def test_a_full_queue_refuses_and_takes_again_when_one_has_gone(server):
    async def ask():
        server._has_weights.set()
        first = await waiting(server, 3)
        with pytest.raises(QueueFull, match="3.* requests wait already"):
            await server.generate(sampling_params={}, request_id="late")
        own = asyncio.create_task(server.generate(sampling_params={"position": (0, 1, "run")}, request_id="run"))
        assert (await asyncio.wait_for(own, GUARD)).response == "run", "a run's own forward is always taken"
        assert await server.abort("1")
        with pytest.raises(RequestAborted):
            await asyncio.wait_for(first[1], GUARD)
        fourth, fifth = [
            asyncio.create_task(server.generate(sampling_params={}, request_id=name)) for name in ("4", "5")
        ]
        with pytest.raises(QueueFull):
            await asyncio.wait_for(fifth, GUARD)
        server.engine.batcher.max_size = 3
        server.engine.batcher._arrived.set()
        answers = await asyncio.wait_for(asyncio.gather(first[0], first[2], fourth), GUARD)
        assert [answer.response for answer in answers] == ["0", "2", "4"]

    asyncio.run(ask())
