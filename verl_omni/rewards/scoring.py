"""One reward of a run: its calls gathered into batches, tried again where they fail, and counted."""

import asyncio
import inspect
import random
from collections.abc import Hashable
from typing import Any

from verl_omni.rewards.choice import Choice
from verl_omni.rewards.registry import LoadedOnce, get_reward_fn
from verl_omni.rewards.reward_function import RewardError, RewardFunction
from verl_omni.utils.batcher import Batcher
from verl_omni.utils.secrets import revealed

FIRST_PAUSE = 0.2  # seconds before a failed call is tried again; twice as long each further time


class Scoring:
    """`score` of single samples. A function for many images is called with up to `batch_size` of them.

    `parallel` batches are scored at once, for a reward with as many processes of its own.
    """

    def __init__(
        self,
        function: RewardFunction,
        batch_size: int = 8,
        retries: int = 0,
        parallel: int = 1,
        services: dict[str, Any] | None = None,
    ):
        self.function, self.retries, self.services = function, retries, services
        loop = asyncio.get_running_loop()

        def work(samples: list[dict[str, Any]]) -> list[dict[str, Any] | RewardError]:
            return asyncio.run_coroutine_threadsafe(self._scores(samples), loop).result()

        self._batcher = Batcher(work, batch_size, 0.01, parallel)
        self._groups = asyncio.Semaphore(parallel)

    async def score(self, sample: dict[str, Any], kind: Any = None, position: tuple | None = None) -> dict[str, Any]:
        """`{"score": ...}` of a sample; samples of one `kind` may meet in a call. Raises what the last try raised."""
        if self.function.batched:
            return await self._batcher.submit(sample, kind, position)
        answer = await self._one(sample)
        if isinstance(answer, RewardError):
            raise answer
        return answer

    async def score_group(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]] | RewardError:
        """Of samples that are seen together, in one call: none of them is tried again without the others. A function
        for single ones is asked one by one, and what one of them raised stands for all."""
        if self.function.batched:
            async with self._groups:
                return await self._tried(samples, self.retries)
        answers = await asyncio.gather(*(self._one(sample) for sample in samples))
        return next((answer for answer in answers if isinstance(answer, RewardError)), answers)

    async def _scores(self, samples: list[dict[str, Any]]) -> list[dict[str, Any] | RewardError]:
        """A batch that fails is tried again image by image: one of them may be the cause."""
        if len(samples) == 1:
            return [await self._one(samples[0])]
        answers = await self._tried(samples, 0)
        if isinstance(answers, RewardError) and answers.wrong_count and self.retries:
            answers = await self._tried(samples, self.retries - 1)
        if not isinstance(answers, RewardError):
            return answers
        if answers.is_final or answers.timed_out or answers.wrong_count:
            return [answers] * len(samples)
        return [await self._one(sample) for sample in samples]

    async def _one(self, sample: dict[str, Any]) -> dict[str, Any] | RewardError:
        answers = await self._tried([sample], self.retries)
        return answers if isinstance(answers, RewardError) else answers[0]

    async def _tried(self, samples: list[dict[str, Any]], retries: int) -> list[dict[str, Any]] | RewardError:
        """The answers, or what the last try raised."""
        for attempt in range(retries + 1):
            if attempt:  # others wait too: not all at the same moment
                await asyncio.sleep(FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            try:
                return await self.function.score(samples, self.services)
            except RewardError as error:
                failure = error
                if error.is_final or error.timed_out:  # another call would hang as long
                    break
        return failure


class Failures:
    """Samples without a score: of how many prompts in a row, and when that ends the run.

    The images of a prompt that cannot be scored fail together, and count once. So does a call that fails, however many
    prompts its images have.
    """

    def __init__(self, on_failure: str = "drop", most_in_a_row: int = 3):
        self.on_failure, self.most = on_failure, most_in_a_row
        self._in_a_row: dict[str, int] = {}
        self._prompts: dict[str, set[Hashable]] = {}
        self._counted: dict[str, RewardError] = {}

    def scored(self, label: str) -> None:
        self._in_a_row[label], self._prompts[label] = 0, set()

    def failed(self, label: str, error: RewardError, prompt: Hashable) -> None:
        """Raises where the run is to end."""
        prompts, count = self._prompts.setdefault(label, set()), self._in_a_row.get(label, 0)
        if prompt not in prompts and self._counted.get(label) is not error:
            count = self._in_a_row[label] = count + 1
            self._counted[label] = error
        prompts.add(prompt)
        if self.on_failure == "stop" or error.is_final:
            raise error
        if count >= self.most:
            raise RewardError(f"{error}; so it went for {count} prompts in a row (reward.max_failures={self.most})")


def as_reward_function(compute_score: Any, choice: Choice) -> RewardFunction:
    """The user's function, or the registered reward with its settings."""
    if isinstance(compute_score, RewardFunction):
        return compute_score
    if compute_score is not None:
        return RewardFunction(compute_score, getattr(compute_score, "__name__", "compute_score"))
    function, settings = get_reward_fn(choice.name), revealed(dict(choice.settings), f"reward.scorers.{choice.label}")
    if inspect.isclass(function):
        return RewardFunction(LoadedOnce(function, settings), described(choice.label))
    return RewardFunction(function, described(choice.label), settings)


def described(label: str) -> str:
    return f'"{label}"'
