"""A user's reward function: found, looked at before anything starts, called, and its answer checked."""

import asyncio
import concurrent.futures
import importlib.util
import inspect
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from verl_omni.utils.errors import RunError
from verl_omni.utils.responses import GIVEN, GIVEN_MANY, Kind, kind_of, pixels_of
from verl_omni.utils.secrets import revealed
from verl_omni.utils.suggest import unknown
from verl_omni.utils.time_limit import SECONDS, TookTooLong, time_limit

# What a function may ask for by the name of its parameter: for one sample, and (plural) for a batch.
TOLD = ("data_source", "prompt", "ground_truth", "extra_info")  # of a row of the data, whatever was made of it
SINGLE = ("data_source", *GIVEN, "prompt", "ground_truth", "extra_info", "other")
BATCHED = ("data_sources", *GIVEN_MANY, "prompts", "ground_truths", "extra_infos", "others")
SERVICES = ("reward_router_address", "reward_model_tokenizer")


def told_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """TOLD, of a row as the run knows it."""
    prompt = row.get("prompt", "")
    return {
        "data_source": row["data_source"],
        "prompt": prompt,
        "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
        "extra_info": dict(row.get("extra_info") or {}) | {"prompt": prompt},
    }


class RewardError(RunError):
    """A reward function that failed or gave no score. Its text is one line in the user's words."""

    timed_out = False
    wrong_count = False  # of the answers to a batch: no image is to blame
    is_final = False  # another try would not help


class _Raised(Exception):
    """Around what a function raised: SystemExit and its like would end an event loop that they come to."""


@contextmanager
def _caught() -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise _Raised from error


class RewardFunction:
    """`score(samples)` for a list of samples, whatever the function's own shape: one or many, sync or async.

    A sample is a dict: its `response`, and what is in SINGLE beside it. What a function is given of a response depends
    on its kind (`verl_omni.utils.responses`). Of an image: `solution_image`, a float tensor in [0, 1], C x H x W (a
    video F x C x H x W), and `image`, the same as a PIL image (a video: a list of them, and `frame_rate`). Of a sound:
    `audio`, a float tensor in [-1, 1], channels x time, and `sample_rate`. Of a text: `text`. With
    `reward.input=latents` it is `latent`, a float tensor, and nothing that is decoded from it.
    `other`, a PIL image too, is the one that an image is compared with under `reward.pairwise.by=pair`; a function that
    does not ask for it sees both beside each other.
    """

    def __init__(self, function: Callable, name: str, kwargs: dict[str, Any] | None = None):
        self.function, self.name, self.kwargs = function, name, dict(kwargs or {})
        self.timeout = 600.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        parameters = inspect.signature(function).parameters
        self.accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.wanted = [n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.required = [n for n in self.wanted if parameters[n].default is inspect.Parameter.empty]
        self.batched = any(n in BATCHED for n in self.wanted)
        self.compares = bool({"other", "others"} & {*self.wanted})
        known = (*(BATCHED if self.batched else SINGLE), *SERVICES, *self.kwargs)
        for n in self.required:
            if n not in known:
                raise ValueError(f"reward function {name}: {unknown('parameter', n, known)}")
        for n in self.kwargs:
            if n in (*SINGLE, *BATCHED, *SERVICES):
                raise ValueError(f"reward function {name}: reward_kwargs.{n} would hide the run's own {n}")
            if n not in self.wanted and not self.accepts_any:
                raise ValueError(f"reward function {name}: {unknown('reward_kwargs', n, self.wanted)}")

    @classmethod
    def of(cls, custom: Any, timeout: float) -> "RewardFunction":
        """That of `reward.custom_reward_function`."""
        from omegaconf import OmegaConf

        kwargs = revealed(OmegaConf.to_object(custom.reward_kwargs), "reward.custom_reward_function.reward_kwargs")
        return cls.load(custom.path, custom.name, kwargs, timeout)

    @classmethod
    def load(
        cls, path: str, name: str, kwargs: dict[str, Any] | None = None, timeout: float = SECONDS
    ) -> "RewardFunction":
        """From a Python file, which is imported within `timeout` seconds. Errors are one line in the user's words."""
        if not os.path.isfile(os.path.expanduser(path)) and not path.startswith("pkg://"):
            raise FileNotFoundError(f'reward.custom_reward_function.path="{path}": there is no such file')
        try:
            with time_limit(timeout):
                module = _module(os.path.expanduser(path))
        except (Exception, SystemExit) as error:
            if isinstance(error, TookTooLong):
                raise ValueError(
                    f'reward.custom_reward_function.path="{path}" is still being imported after {timeout:g} s: '
                    "mend it, or raise reward.timeout"
                ) from error
            raise ValueError(
                f'reward.custom_reward_function.path="{path}" cannot be imported: {type(error).__name__}: {error}'
            ) from error
        function = getattr(module, name, None)
        if not callable(function):
            known = [n for n, thing in vars(module).items() if inspect.isfunction(thing)]
            raise ValueError(unknown(f"reward.custom_reward_function.name in {path}", name, known))
        return cls(function, f"{name} ({path})", kwargs)

    async def score(
        self, samples: list[dict[str, Any]], services: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """One `{"score": float, ...}` for each sample; any failure raises."""
        if not self.batched:
            return [await self._one(sample, services or {}) for sample in samples]
        told = [self._told(sample) for sample in samples]
        plural = {many: [t.get(one) for t in told] for one, many in zip(SINGLE, BATCHED, strict=True) if one in told[0]}
        results = await self._call(plural, services or {}, samples[0])
        if hasattr(results, "tolist"):  # a tensor or an array
            results = results.tolist()
        if not isinstance(results, list | tuple) or len(results) != len(samples):
            count = f"{len(results)}" if hasattr(results, "__len__") else type(results).__name__
            failure = RewardError(
                f"reward function {self.name} returned {count} for {len(samples)} images: expected a list with one "
                "score (or dict with a score) for each"
            )
            failure.wrong_count = True
            raise failure
        return [self._checked(r, s) for r, s in zip(results, samples, strict=True)]

    async def _one(self, sample: dict[str, Any], services: dict[str, Any]) -> dict[str, Any]:
        return self._checked(await self._call(self._told(sample), services, sample), sample)

    def check_takes(self, kind: Kind) -> None:
        """Raises one line where this function asks for what a response of this kind is not."""
        all_given, given = (GIVEN_MANY, {f"{n}s" for n in kind.given}) if self.batched else (GIVEN, set(kind.given))
        for n in self.required:
            if n in all_given and n not in given:
                what, remedy = f"what the model makes is {kind.name}", ""
                if kind.name == "latents":
                    what, remedy = "what it is given is latents", "; leave reward.input=latents out"
                elif n in ("latent", "latents"):
                    remedy = "; a run gives them with reward.input=latents"
                failure = RewardError(
                    f"reward function {self.name} asks for {n}, and {what}: that has {', '.join(sorted(given))}{remedy}"
                )
                failure.is_final = True
                raise failure

    def _told(self, sample: dict[str, Any]) -> dict[str, Any]:
        """What a function may ask for of a sample; a picture is made where somebody looks."""
        values = {k: v for k, v in sample.items() if k not in ("response", "other")}
        if self.compares:
            values["other"] = _other(sample)
        if "response" not in sample:  # of a trial, for which it was made already
            return values
        response = sample["response"]
        kind = kind_of(response)
        self.check_takes(kind)
        for n, give in kind.given.items():
            if self.accepts_any or (f"{n}s" if self.batched else n) in self.wanted:
                values[n] = give(response)
        return values

    async def _call(self, values: dict[str, Any], services: dict[str, Any], sample: dict[str, Any]) -> Any:
        offered = values | services
        arguments = {n: offered[n] for n in offered if n in self.wanted or self.accepts_any} | self.kwargs
        prompt = f'(prompt: "{sample.get("prompt", "")}")'
        try:
            return await self._in_time(arguments)
        except asyncio.TimeoutError as error:
            failure = RewardError(
                f"reward function {self.name} gave no answer within {self.timeout:g} s {prompt}: mend it, or raise "
                "reward.timeout"
            )
            failure.timed_out = True
            raise failure from error
        except _Raised as raised:
            error = raised.__cause__
            said = f"raised {type(error).__name__}: {error}"
            if isinstance(error, SystemExit | KeyboardInterrupt):
                said = f"wanted to end the process ({type(error).__name__})"
            raise RewardError(f"reward function {self.name} {said} {prompt}") from error

    async def _in_time(self, arguments: dict[str, Any]) -> Any:
        """The function's answer, `timeout` seconds after it began at the latest; time in a queue does not count.

        It runs in threads of its own: while it blocks one, this process can still tell.
        """
        loop = asyncio.get_running_loop()
        if hasattr(self.function, "load"):  # a model, which may take longer than any answer
            await loop.run_in_executor(None, self._load)
        if inspect.iscoroutinefunction(self.function):
            return await self._awaited(self.function(**arguments))
        answer: concurrent.futures.Future = concurrent.futures.Future()

        def run() -> None:
            answer.set_running_or_notify_cancel()  # from here on it takes an answer, even one that comes too late
            try:
                with _caught():
                    result = self.function(**arguments)
            except _Raised as raised:
                answer.set_exception(raised)
            else:
                answer.set_result(result)

        async with self._places():
            # A thread for each call: one that hangs for ever must not keep others from beginning.
            threading.Thread(target=run, daemon=True).start()
            result = await asyncio.wait_for(asyncio.wrap_future(answer), self.timeout)
        return await self._awaited(result) if inspect.isawaitable(result) else result

    def _places(self) -> asyncio.Semaphore:
        """So many calls at once; a call that was given up has left its place."""
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:
            self._turns = (loop, asyncio.Semaphore(min(32, (os.cpu_count() or 1) + 4)))
        return self._turns[1]

    def _load(self) -> None:
        try:
            self.function.load()
        except (Exception, SystemExit) as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            failure = RewardError(f"reward function {self.name} cannot be loaded: {said}")
            failure.is_final = True
            raise failure from error

    async def _awaited(self, answer: Awaitable[Any]) -> Any:
        """In one event loop for all calls, where a function's connections live, apart from this process's own."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()

        async def run() -> Any:
            with _caught():
                return await answer

        running = asyncio.run_coroutine_threadsafe(run(), self._loop)
        return await asyncio.wait_for(asyncio.wrap_future(running), self.timeout)

    def _checked(self, result: Any, sample: dict[str, Any]) -> dict[str, Any]:
        answer = dict(result) if isinstance(result, dict) else {"score": result}
        score = answer.get("score")
        if getattr(score, "size", None) == 1 or callable(getattr(score, "numel", None)) and score.numel() == 1:
            score = score.item()  # of an array or a tensor
        if isinstance(score, int) and abs(score) > sys.float_info.max:
            score = "an integer beyond any float"
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise RewardError(
                f"reward function {self.name} returned {score!r:.200}: expected a finite number, or a dict with one "
                f'under "score" (prompt: "{sample.get("prompt", "")}")'
            )
        return answer | {"score": float(score)}


def _module(path: str) -> ModuleType:
    """A file, or pkg://module, as verl names them; not among sys.modules."""
    if path.startswith("pkg://"):
        return importlib.import_module(path.removeprefix("pkg://").replace("/", "."))
    spec = importlib.util.spec_from_file_location(f"custom_module_{hash(os.path.abspath(path))}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _other(sample: dict[str, Any]) -> Any:
    from verl_omni.utils.pictures import as_pil

    other = pixels_of(sample["other"])
    return as_pil(other) if hasattr(other, "shape") else other
