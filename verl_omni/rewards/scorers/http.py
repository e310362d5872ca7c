"""A scorer on another machine: the client of `verl-omni serve-reward`."""

import math
from functools import partial
from typing import Any

from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.serving.client import BadAnswer, Count, HttpClient, Retries, Seconds
from verl_omni.rewards.serving.contract import Encoding, Sample, encode


@register_reward("http")
class HttpScorer:
    """The scores of ``scorer`` on the server at ``address``; replicas of it are separated by commas.

    Each image is a request: the server gathers those of all its clients into batches. One that fails is repeated up to
    ``retries`` times, later each time, on another replica where there is one. A server that is busy, or not there, is
    waited for up to ``timeout`` seconds. A replica that has failed ``breaker_after`` times in a row is left alone for
    ``breaker_pause`` seconds, then one request tries it. ``encoding`` is how images travel: "png" is smaller, "tensor"
    needs no time to compress.
    """

    def __init__(
        self,
        *,
        address: str,
        scorer: str,
        token_env: str | None = None,
        encoding: Encoding = "png",
        timeout: Seconds = 300.0,
        retries: Retries = 8,
        concurrency: Count = 16,
        breaker_after: Count = 5,
        breaker_pause: Seconds = 5.0,
    ):
        self.path, self.encoding = f"/v1/score/{scorer}", encoding
        self.client = HttpClient(
            address,
            token_env=token_env,
            timeout=timeout,
            retries=retries,
            concurrency=concurrency,
            breaker_after=breaker_after,
            breaker_pause=breaker_pause,
        )

    def __call__(self, images: list, ground_truths: list, prompts: list[str], extra_infos: list[dict]) -> list[dict]:
        samples = map(Sample, images, ground_truths, prompts, extra_infos)
        return self.client.ask_all(self.path, [partial(encode, s, self.encoding) for s in samples], read_score)


def read_score(answer: Any) -> dict[str, Any]:
    """The one score of a request with one sample."""
    scores = answer.get("scores") if isinstance(answer, dict) else None
    one = scores[0] if isinstance(scores, list) and len(scores) == 1 else None
    score = one.get("score") if isinstance(one, dict) else None
    if not isinstance(score, int | float) or not math.isfinite(score):
        raise BadAnswer(f'answered {answer!r:.200}: expected {{"scores": [{{"score": a number, ...}}]}}')
    return one
