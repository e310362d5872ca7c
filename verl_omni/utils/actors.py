"""Ray actors that may die and are started again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from verl_omni.utils.errors import QueueFull

T = TypeVar("T")
PAUSE_SECONDS = 0.5  # between two questions to an actor that is being started, or has no room


async def asked_until_back(ask: Callable[[], Awaitable[T]], elsewhere: Callable[[], bool] = lambda: False) -> T:
    """The answer of an actor that Ray starts again when it dies, or has no room now. `ActorDiedError`: it will not come
    back. `elsewhere` says whether `ask` will ask another one."""
    while True:
        try:
            return await ask()
        except QueueFull:
            await asyncio.sleep(PAUSE_SECONDS)
        except ActorUnavailableError:
            if not elsewhere():
                await asyncio.sleep(PAUSE_SECONDS)


async def watch(name: str, actor: Any, came_back: Callable[[], Awaitable[None]]) -> None:
    """Calls `came_back` whenever Ray has started an actor again; ends with an actor that has died for good.

    The actor has a method `life`, which never answers. One that cannot come back is ended, so that nobody waits for it.
    """
    while True:
        try:
            await actor.life.remote()
        except ActorDiedError:
            return  # told by who asks something of it
        except ActorUnavailableError:
            print(f"{name} has died and is started again", flush=True)
            try:
                await came_back()
            except ActorDiedError:
                return
            except Exception as error:  # whoever waits for the actor learns that it is gone
                *_, last = [type(error).__name__, *filter(str.strip, str(error).splitlines())]
                print(f"{name} could not come back: {last.strip()}", flush=True)
                ray.kill(actor)
                return
