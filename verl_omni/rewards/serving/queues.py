"""One scorer behind a server: samples of all requests stand in one queue, and one thread scores them in batches."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verl_omni.rewards.serving.contract import PackedSample, Sample, plain
from verl_omni.rewards.serving.metrics import Metrics
from verl_omni.utils.batcher import Batcher
from verl_omni.utils.errors import Refused
from verl_omni.utils.free_memory import give_back_memory

# How long a batch that is not full waits for more.
GATHER_SECONDS = 0.005
# Less of it is soon used again.
WORTH_GIVING_BACK = 2**25


class DecodingRoom:
    """Bytes for the decoded images of all scorers. Who needs more than is left waits, who came first goes first."""

    def __init__(self, size: int):
        self.size, self._left = size, size
        self._turn, self._changed = threading.Lock(), threading.Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._left >= size)
            self._left -= size
        try:
            yield
        finally:
            with self._changed:
                self._left += size
                self._changed.notify_all()


@dataclass(eq=False)
class _Place:
    sample: PackedSample
    gone: bool = False


class ScorerQueue:
    """`score(samples)` from an event loop; who comes when `size` places are taken is refused.

    Images are decoded when their turn has come, so that no more of them are in memory than one batch has. A sample that
    takes more than its part of the room is scored alone, and in turn with the batches of others.
    """

    def __init__(
        self,
        name: str,
        scorer: Callable[..., list[dict[str, Any]]],
        max_batch: int,
        size: int,
        room: DecodingRoom,
        metrics: Metrics,
    ):
        self.name, self.scorer, self.size, self.room, self.metrics = name, scorer, size, room, metrics
        self.taken, self.large = 0, room.size // max_batch
        self._batcher = Batcher(self._score_places, max_batch, GATHER_SECONDS)
        metrics.waiting.labels(name).set_function(lambda: self.taken)

    def check_room(self, count: int = 1) -> None:
        if self.taken + count > self.size:
            raise Refused(503, f"the queue of {self.name} is full: {self.taken} of {self.size} places are taken")

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Room for `count` samples until they are answered."""
        self.check_room(count)
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    async def score(self, samples: list[PackedSample]) -> list[dict[str, Any]]:
        """A checked answer for each sample; what the scorer says against one of them is raised as `Refused`."""
        places = [_Place(sample) for sample in samples]
        waiting = [asyncio.ensure_future(self._submit(place)) for place in places]
        try:
            answers = await asyncio.gather(*waiting)
        except (asyncio.CancelledError, Refused):
            for place, one in zip(places, waiting, strict=True):  # nobody waits for the answer: the rest is not scored
                place.gone = True
                one.cancel()
            raise
        for index, answer in enumerate(answers):
            if isinstance(answer, _Failure):
                raise Refused(answer.status, f"sample {index}: {answer.words}")
        return answers

    async def _submit(self, place: _Place) -> Any:
        if place.sample.decoded_bytes > self.large:
            return await self._batcher.submit(place, None, (0, 1, place), True)  # a guest: others go every second time
        return await self._batcher.submit(place)

    def _score_places(self, places: list[_Place]) -> list[Any]:
        """In the queue's thread. Never raises: a failure is an answer too, to those whose sample it was."""
        present = [place for place in places if not place.gone]
        size = sum(place.sample.decoded_bytes for place in present)
        with self.room.taken(size):
            answers = self._score_packed([place.sample for place in present])
            if size >= WORTH_GIVING_BACK:
                give_back_memory()
        by_place = dict(zip(present, answers, strict=True))
        return [by_place.get(place) for place in places]

    def _score_packed(self, packed: list[PackedSample]) -> list[Any]:
        opened = [_opened(sample) for sample in packed]
        good = [sample for sample in opened if isinstance(sample, Sample)]
        answers = iter(self._score(good) if good else [])
        return [next(answers) if isinstance(sample, Sample) else sample for sample in opened]

    def _score(self, samples: list[Sample]) -> list[Any]:
        began = time.perf_counter()
        try:
            answers = self._call(samples)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if len(samples) > 1:  # one bad sample must not fail those of other requests
                return [self._score([sample])[0] for sample in samples]
            answers = [_Failure.of(self.name, error)]
        self.metrics.batch_size.labels(self.name).observe(len(samples))
        self.metrics.batch_seconds.labels(self.name).observe(time.perf_counter() - began)
        return answers

    def _call(self, samples: list[Sample]) -> list[dict[str, Any]]:
        answers = self.scorer(
            [s.image for s in samples],
            [s.ground_truth for s in samples],
            [s.prompt for s in samples],
            [s.extra_info or {} for s in samples],
        )
        count = len(answers) if isinstance(answers, list | tuple) else repr(answers)[:100]
        if count != len(samples):
            raise RuntimeError(f"returned {count} for {len(samples)} images: expected a list with one dict for each")
        return [_checked(answer) for answer in answers]


def _opened(sample: PackedSample) -> Sample | Refused:
    """An exception among the answers is raised to who waits for it."""
    try:
        return sample.open()
    except Refused as refused:
        return refused


@dataclass
class _Failure:
    status: int
    words: str

    @classmethod
    def of(cls, name: str, error: BaseException) -> "_Failure":
        """422 for what no second try would change, in the scorer's own words; 500 for the rest."""
        said = " ".join(str(error).split())[:1000] or "no message"
        if isinstance(error, ValueError | TypeError):
            return cls(422, said)
        return cls(500, f"the scorer {name} failed: {type(error).__name__}: {said}")


def _checked(answer: Any) -> dict[str, Any]:
    """As it is sent: plain numbers and texts, and the score a finite one."""
    score = answer.get("score") if isinstance(answer, dict) else answer
    score = plain(score) if hasattr(score, "tolist") else score
    if not isinstance(answer, dict) or not isinstance(score, int | float) or not math.isfinite(score):
        raise RuntimeError(f'returned {score!r:.100}: expected a dict with a finite number under "score"')
    try:
        return json.loads(json.dumps(answer | {"score": float(score)}, default=plain, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"returned {answer!r:.200}, which cannot be sent as JSON: {error}") from error
