"""A reward in processes of its own: it never holds up who asks, and may have devices that nobody else uses."""

import inspect
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray

from verl_omni.rewards.choice import Choice
from verl_omni.rewards.registry import Scores, get_reward_fn
from verl_omni.utils.external_lib import import_external_lib
from verl_omni.utils.secrets import revealed

PICTURES, KEYWORD = ("images", "ground_truths", "prompts", "extra_infos"), inspect.Parameter.POSITIONAL_OR_KEYWORD
Places = Callable[[str], list[dict[str, Any]]]  # name of a pool -> for each of its processes, Ray's options


class ScorerProcess:
    """One process: the reward is loaded once, and scores batches."""

    def __init__(self, name: str, settings: Mapping[str, Any], external_lib: Any):
        import_external_lib(external_lib)
        reward, settings = get_reward_fn(name), revealed(dict(settings), f"reward.scorers.{name}")
        self._settings = {} if inspect.isclass(reward) else settings
        self._scorer = reward(**settings) if inspect.isclass(reward) else reward
        parameters = inspect.signature(self._scorer).parameters.values()
        self._wanted = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    def loaded(self) -> None:
        """Answered once the reward is there."""

    def score(self, columns: dict[str, list]) -> Scores:
        return self._scorer(**{k: v for k, v in columns.items() if k in self._wanted}, **self._settings)


class ScorerPool:
    """Its processes, called like a function: each batch goes to one that is free."""

    def __init__(self, processes: list[Any], takes: Iterable[str] = PICTURES):
        """`takes`: the columns of a batch that the reward is given."""
        self._processes, self._lock, self._loaded = processes, threading.Lock(), False
        self.__signature__ = inspect.Signature([inspect.Parameter(name, KEYWORD) for name in takes])
        self._free: queue.SimpleQueue = queue.SimpleQueue()
        for process in processes:
            self._free.put(process)

    def load(self) -> None:
        """Once: later on, a process that scores would keep this waiting. One that dies is no failure to load."""
        with self._lock:
            for process in self._processes if not self._loaded else ():
                try:
                    ray.get(process.loaded.remote())
                except ray.exceptions.RayActorError as error:
                    if error.actor_init_failed:
                        raise RuntimeError(_why(error)) from error
            self._loaded = True

    def __call__(self, **columns: list) -> Scores:
        process = self._free.get()
        try:
            return ray.get(process.score.remote(columns))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        finally:
            self._free.put(process)


def scorer_pool(label: str) -> str:
    """What the processes of a reward are called where devices are dealt out."""
    return f"scorer {label}"


def start_pools(choices: Mapping[str, Choice], external_lib: Any, places: Places) -> dict[str, list[Any]]:
    """Label -> processes of the rewards that want some. One that dies is started again by Ray."""
    process = ray.remote(ScorerProcess)
    return {
        label: [
            process.options(**place, max_restarts=-1).remote(choice.name, dict(choice.settings), external_lib)
            for place in places(scorer_pool(label))
        ]
        for label, choice in choices.items()
        if choice.processes
    }


def _why(error: Exception) -> str:
    """The last line of what Ray says of a process that did not start."""
    return [line.strip() for line in str(error).splitlines() if line.strip()][-1]
