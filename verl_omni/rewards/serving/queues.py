"""One scorer behind a server: samples of all requests stand in one queue, and one thread scores them in batches."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verl_omni.rewards.serving.contract import Sample, plain
from verl_omni.rewards.serving.metrics import Metrics
from verl_omni.utils.batcher import Batcher
from verl_omni.utils.errors import Refused

# How long a batch that is not full waits for more.
GATHER_SECONDS = 0.005


@dataclass(eq=False)
class _Place:
    sample: Sample
    gone: bool = False


class ScorerQueue:
    """`score(samples)` from an event loop; who comes when `size` places are taken is refused."""

    def __init__(
        self, name: str, scorer: Callable[..., list[dict[str, Any]]], max_batch: int, size: int, metrics: Metrics
    ):
        self.name, self.scorer, self.size, self.metrics = name, scorer, size, metrics
        self.taken = 0
        self._batcher = Batcher(self._score_places, max_batch, GATHER_SECONDS)
        metrics.waiting.labels(name).set_function(lambda: self.taken)

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Room for `count` samples, from before they are read until they are answered."""
        if self.taken + count > self.size:
            raise Refused(503, f"the queue of {self.name} is full: {self.taken} of {self.size} places are taken")
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    async def score(self, samples: list[Sample]) -> list[dict[str, Any]]:
        """A checked answer for each sample; what the scorer says against one of them is raised as `Refused`."""
        places = [_Place(sample) for sample in samples]
        try:
            answers = await asyncio.gather(*(self._batcher.submit(place) for place in places))
        except asyncio.CancelledError:
            for place in places:  # nobody waits for the answer: those that still stand in the queue are not scored
                place.gone = True
            raise
        for index, answer in enumerate(answers):
            if isinstance(answer, _Failure):
                raise Refused(answer.status, f"sample {index}: {answer.words}")
        return answers

    def _score_places(self, places: list[_Place]) -> list[Any]:
        """In the queue's thread. Never raises: a failure is an answer too, to those whose sample it was."""
        present = [place for place in places if not place.gone]
        answers = self._score([place.sample for place in present]) if present else []
        by_place = dict(zip(present, answers, strict=True))
        return [by_place.get(place) for place in places]

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
