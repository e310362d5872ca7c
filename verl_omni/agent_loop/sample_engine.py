"""The rollout engine as one sample sees it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

from verl_omni.agent_loop.routing import Block
from verl_omni.utils.actors import asked_until_back
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.trajectories import TrajectoryRef


class SampleEngine:
    """The same, whatever the sample's agent loop hands on.

    A sample's place in the burst belongs to the first request that is sent. Later turns, of which some samples have
    more than others, are batched as they come; a sample whose loop ends without a request gives its place back. Each
    request's trajectory is left under a name of its own: those are trained on that the loop names (`trained`), or the
    one that made the response which it returns. Where a server has died that comes back, another draws what is
    missing, if any may.
    """

    def __init__(self, servers: list[Any], block: Block, row: dict[str, Any]):
        self.servers, self.block = servers, block
        self.position, self.place = row.get("position"), row.get("place")
        self.generate = SimpleNamespace(remote=self._generate)
        self.abort = SimpleNamespace(remote=self._abort)
        self.answers: list[RolloutOutput] = []
        self._requests, self._has_asked = 0, False

    @property
    def server(self) -> Any:
        return self.servers[self.block.server]

    async def _generate(self, *, sampling_params: dict[str, Any], **request: Any) -> RolloutOutput:
        number, self._requests = self._requests, self._requests + 1
        params = {k: v for k, v in sampling_params.items() if k not in ("position", "place")}
        if self.place is not None:
            params["place"] = self.place | {"key": f"{self.place['key']}.{number}" if number else self.place["key"]}
        await self.block.placed.wait()
        asked, first, self._has_asked = self.block.server, not self._has_asked, True
        # Where the block was moved, others of the burst have been asked for elsewhere.
        position = self.position if first and not self.block.moved else None

        def ask() -> Awaitable[RolloutOutput]:
            nonlocal asked, position
            asked, given = self.block.server, params | ({} if position is None else {"position": position})
            return self._ask(sampling_params=given, **request)

        def elsewhere() -> bool:
            """Whoever is asked again may have answered a part of the burst before, and others need not wait for it."""
            nonlocal position
            if position is not None:
                self._withdrawing = asyncio.ensure_future(self._withdraw_at(asked))
            position = None
            return self.block.elsewhere(asked)

        try:
            answer = await asked_until_back(ask, elsewhere)
        except asyncio.CancelledError:  # nobody waits for it any more: it need not be drawn
            with contextlib.suppress(RayActorError):  # gone with its server
                await self.servers[asked].abort.remote(request["request_id"])
            raise
        finally:
            if first:
                self.block.answered()
        self.answers.append(answer)
        return answer

    async def _abort(self, request_id: str) -> bool:
        return await self.server.abort.remote(request_id)

    async def _ask(self, *, sampling_params: dict[str, Any], **request: Any) -> RolloutOutput:
        place = sampling_params.get("place")
        if place is None or not place["ship"]:
            return await self.server.generate.remote(sampling_params=sampling_params, **request)
        answer, stored = self.server.generate_to_ship.remote(sampling_params=sampling_params, **request)
        return replace(await answer, reference=TrajectoryRef(place["key"], stored))

    async def leave(self) -> None:
        if self._has_asked:
            return
        await self.block.placed.wait()
        if self.position is not None:
            await self._withdraw_at(self.block.server)
        self.block.answered()

    async def _withdraw_at(self, server: int) -> None:
        with contextlib.suppress(ActorUnavailableError):  # the places went with it
            await self.servers[server].withdraw.remote(self.position)

    def trained(self, response: Any, named: Sequence[RolloutOutput]) -> list[RolloutOutput]:
        """The requests that are trained on: those that the loop has named, or the one that made what it returned."""
        for answer in named:
            if not any(answer is one for one in self.answers):
                raise ValueError("an agent loop names an answer to be trained on that this sample did not get")
        if named:
            return list(named)
        own = [answer for answer in self.answers if answer.response is response]
        if not own and len(self.answers) > 1:
            raise ValueError(
                f"an agent loop asked for {len(self.answers)} images and returned none of them: which one is to be "
                "trained on? Return the response of one request as it came, or name those that are (`trained`)"
            )
        return (own or self.answers or [RolloutOutput(response)])[:1]
