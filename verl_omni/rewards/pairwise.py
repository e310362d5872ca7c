"""Win rate in the group (`reward.pairwise`): an image's reward is the share of comparisons that it wins.

The images of a prompt come to one reward process, each when it is drawn. When the last is there, they are compared: all
pairs, or each with some opponents drawn at random. `by=score` compares what the reward says of each image alone;
`by=pair` shows the reward two images at a time. `by=group` shows it all of them, and takes the scores that it gives.
"""

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from verl_omni.rewards.reward_function import RewardError
from verl_omni.utils.responses import Video, pixels_of

GAP = 8  # white pixels between two images side by side
Answer = dict[str, Any]  # reward_score, reward_extra_info, and reward_failure where there is no score


@dataclass
class _Group:
    there: dict[int, Any] = field(default_factory=dict)
    result: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Comparisons:
    """`share` of each image of a group. `ask` scores a sample, or a pair of them, as any sample is scored."""

    def __init__(
        self,
        by: str,
        opponents: int | None,
        ask: Callable[[dict[str, Any]], Awaitable[Answer]],
        ask_group: Callable[[list[dict[str, Any]]], Awaitable[list[Answer]]] | None = None,
    ):
        """`ask_group`, for `by=group`, scores all samples of a group at once."""
        self.by, self.opponents, self.ask, self.ask_group = by, opponents, ask, ask_group
        self._groups: dict[str, _Group] = {}

    async def share(self, group: str, place: tuple[int, int], sample: dict[str, Any]) -> Answer:
        """Of the image at this place (index, size) in its group; waits for all others."""
        index, size = place
        own = self._groups.setdefault(group, _Group())
        own.there[index] = await self.ask(sample) if self.by == "score" else sample
        if len(own.there) == size:
            del self._groups[group]
            try:
                own.result.set_result(await self._compared(group, [own.there[i] for i in range(size)]))
            except Exception as error:
                own.result.set_exception(error)
        return (await asyncio.shield(own.result))[index]

    async def _compared(self, group: str, members: list[Any]) -> list[Answer]:
        if self.by == "group":
            return await self.ask_group(members)
        wins: list[list[float]] = [[] for _ in members]
        failure = None
        chosen = pairs(range(len(members)), self.opponents, group)
        answers = await asyncio.gather(*(self._pair(members[i], members[j]) for i, j in chosen))
        for (i, j), (won, reason) in zip(chosen, answers, strict=True):
            failure = failure or reason
            if won is not None:
                wins[i].append(won)
                wins[j].append(1 - won)
        return [self._answer(member, own, failure) for member, own in zip(members, wins, strict=True)]

    async def _pair(self, one: Any, other: Any) -> tuple[float | None, str | None]:
        """(how far the first has won, 0 to 1; why nobody knows)."""
        if self.by == "score":
            scores = [answer["reward_score"] for answer in (one, other)]
            if any(map(math.isnan, scores)):
                return None, one.get("reward_failure") or other.get("reward_failure")
            return (0.5 if scores[0] == scores[1] else float(scores[0] > scores[1])), None
        answer = await self.ask(one | {"other": other["response"]})
        won = answer["reward_score"]
        if math.isnan(won):
            return None, answer.get("reward_failure")
        if not 0 <= won <= 1:
            failure = RewardError(
                f"reward.pairwise.by=pair: the reward said {won:g} of two images; expected 1 where the first is the "
                "better one, 0 where the second is, or a number in between"
            )
            failure.is_final = True
            raise failure
        return won, None

    def _answer(self, member: Any, wins: list[float], failure: str | None) -> Answer:
        told = dict(member["reward_extra_info"]) if self.by == "score" else {}
        if self.by == "score" and math.isnan(member["reward_score"]):
            return member
        if not wins:
            why = failure or "no other image of its prompt to compare with"
            return {"reward_score": math.nan, "reward_extra_info": {}, "reward_failure": why}
        if self.by == "score":
            told["score_alone"] = member["reward_score"]
        return {"reward_score": sum(wins) / len(wins), "reward_extra_info": told | {"comparisons": len(wins)}}


def pairs(members: range, opponents: int | None, group: str) -> list[tuple[int, int]]:
    """Which are compared, each two once; who comes first is drawn, as judges like the first, or the left one, better.

    What is drawn depends on the group's name alone.
    """
    draw = random.Random(group)
    if opponents is None:
        found = list(itertools.combinations(members, 2))
    else:
        others = {i: draw.sample([j for j in members if j != i], min(opponents, len(members) - 1)) for i in members}
        found = sorted({(min(i, j), max(i, j)) for i in members for j in others[i]})
    return [pair if draw.random() < 0.5 else pair[::-1] for pair in found]


def beside(one: torch.Tensor | Video, other: torch.Tensor | Video) -> torch.Tensor | Video:
    """Two images (..., C, H, W) of one size, or videos, as one picture, side by side."""
    if isinstance(one, Video):
        return replace(one, frames=beside(one.frames, pixels_of(other)))
    white = one.new_full((*one.shape[:-1], GAP), 1 if one.is_floating_point() else 255)
    return torch.cat([one, white, other], dim=-1)
