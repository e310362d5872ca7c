"""The rollout engine as one sample sees it."""

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError

from verl_omni.agent_loop.routing import Block
from verl_omni.utils.actors import asked_until_back
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.trajectories import TrajectoryRef


class SampleEngine:
    """The same, whatever the sample's agent loop hands on.

    A sample's place in the burst belongs to its first request. Later turns, of which some samples have more than
    others, are batched as they come; a sample that never asks gives its place back. Each request's trajectory is left
    under a name of its own: the one that is trained on is that of the response which the loop returns. Where a server
    has died, another draws what is missing, if any may.
    """

    def __init__(self, servers: list[Any], block: Block, row: dict[str, Any]):
        self.servers, self.block = servers, block
        self.position, self.place = row.get("position"), row.get("place")
        self.generate = SimpleNamespace(remote=self._generate)
        self.abort = SimpleNamespace(remote=self._abort)
        self.answers: list[RolloutOutput] = []
        self._requests = 0

    @property
    def server(self) -> Any:
        return self.servers[self.block.server]

    async def _generate(self, *, sampling_params: dict[str, Any], **request: Any) -> RolloutOutput:
        number, self._requests = self._requests, self._requests + 1
        params = {k: v for k, v in sampling_params.items() if k not in ("position", "place")}
        if number == 0 and self.position is not None:
            params["position"] = self.position
        if self.place is not None:
            params["place"] = self.place | {"key": f"{self.place['key']}.{number}" if number else self.place["key"]}

        asked = self.block.server

        def ask() -> Awaitable[RolloutOutput]:
            nonlocal asked
            asked, given = self.block.server, dict(params)
            params.pop("position", None)  # whoever is asked again may have answered a part of the burst before
            return self._ask(sampling_params=given, **request)

        try:
            answer = await asked_until_back(ask, lambda: self.block.elsewhere(asked))
        except asyncio.CancelledError:  # nobody waits for it any more: it need not be drawn
            with contextlib.suppress(RayActorError):  # gone with its server
                await self._abort(request["request_id"])
            raise
        if number == 0:
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
        if not self._requests and self.position is not None:
            await asked_until_back(lambda: self.server.withdraw.remote(self.position))
            self.block.answered()

    def answer_of(self, response: Any) -> RolloutOutput:
        """The request that made what the loop returned."""
        own = [answer for answer in self.answers if answer.response is response]
        if not own and len(self.answers) > 1:
            raise ValueError(
                f"an agent loop asked for {len(self.answers)} images and returned none of them: which one is to be "
                "trained on? Return the response of one request as it came"
            )
        return (own or self.answers or [RolloutOutput(response)])[0]
