"""An error that ends a run as one line: what was wrong in the user's words, or which process died at what."""

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from omegaconf.errors import OmegaConfBaseException

from verl_omni.trainer.interrupts import Stopped, exit_code
from verl_omni.trainer.progress import progress, tell
from verl_omni.utils.errors import RunError
from verl_omni.utils.hub import HubError

# Their text says all that a user needs. Others are shown with their type.
PLAIN = (ValueError, FileNotFoundError, ModuleNotFoundError, NotImplementedError, OmegaConfBaseException, HubError)

# What ranks say whose partner is gone.
LOST = re.compile("connection|peer|socket|nccl|timed out|timeout", re.IGNORECASE)

_processes: dict[str, str] = {}  # Ray's id of an actor -> what we call it


def know(name: str, actors: Iterable[Any]) -> None:
    """Call these processes `name 0`, `name 1`, ..., should one of them die."""
    for i, actor in enumerate(actors):
        _processes[actor._actor_id.hex()] = f"{name} {i}"


@contextmanager
def in_one_line() -> Iterator[None]:
    """Whatever fails in here is raised as a `RunError`, while Ray is still there to be asked who died."""
    try:
        yield
    except Stopped as stopped:
        tell(over=exit_code(), last=one_line(innermost(stopped)))
        raise
    except Exception as error:
        line = what_failed(error)
        tell(over=1, last=f"error: {line}")
        if isinstance(error, RunError):
            raise
        raise RunError(line) from error


def users_mistake(error: BaseException) -> str | None:
    """The line of what is found before the workers start, and of any process's `RunError`."""
    from ray.exceptions import RayError

    if isinstance(error, RunError) or isinstance(error, PLAIN) and not isinstance(error, RayError):
        return one_line(innermost(error))
    return None


def what_failed(error: BaseException) -> str:
    """Any failure of a run that has started its processes."""
    line = users_mistake(error)
    if line is not None:
        return line
    dead = who_died(error)
    if dead:
        return how_they_died(dead)
    cause = innermost(error)
    if is_out_of_memory(cause) or isinstance(cause, PLAIN):
        return one_line(cause)
    return f"{type(cause).__name__} during the {progress.where()}: {one_line(cause)}"


class Dead(NamedTuple):
    name: str
    pid: int
    node: str | None  # the address of its machine, where that has died

    def __str__(self) -> str:
        return self.name if self.node else f"{self.name} (pid {self.pid})"


def how_they_died(dead: list[Dead]) -> str:
    """A machine takes all of its processes along: then it is the one to be named."""
    named = " and ".join(map(str, dead))
    if nodes := sorted({one.node for one in dead if one.node}):
        one = len(nodes) == 1
        return (
            f"{'node' if one else 'nodes'} {', '.join(nodes)} died during the {progress.where()}, and {named} with "
            f"{'it' if one else 'them'}"
        )
    why = "it was killed, or it crashed" if len(dead) == 1 else "they were killed, or they crashed"
    return f"{named} died during the {progress.where()}: {why}"


def who_died(error: BaseException) -> list[Dead]:
    """Our processes that ended by themselves. One rank's death can reach us first as another rank's lost connection."""
    from ray.exceptions import RayActorError, RayTaskError

    deaths = [e for e in chain(error) if isinstance(e, RayActorError) and not e.actor_init_failed]
    broken = isinstance(innermost(error), RuntimeError | ConnectionError) and isinstance(error, RayTaskError)
    deadline = time.monotonic() + (_patience(innermost(error)) if deaths or broken else 0)
    while True:
        dead = list(dead_processes())
        if dead or time.monotonic() > deadline:
            return dead
        time.sleep(0.2)


def _patience(error: BaseException) -> float:
    """Seconds. Ray knows the end of a process at once, and that of a machine when it has not answered for a while."""
    import ray

    several = ray.is_initialized() and sum(node["Alive"] for node in ray.nodes()) > 1
    return 30 if several and LOST.search(str(error)) else 5


def dead_processes() -> Iterator[Dead]:
    import ray

    if not _processes:
        return
    gone = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if not node["Alive"]}
    for actor, name in _processes.items():
        state = ray._private.state.actors(actor)
        if state.get("State") == "DEAD":
            yield Dead(name, state.get("Pid", 0), gone.get(state.get("Address", {}).get("NodeID")))


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it wraps: Ray puts another around it in each process that it passes."""
    while error is not None:
        yield error
        error = getattr(error, "cause", None) or error.__cause__


def innermost(error: BaseException) -> BaseException:
    """The error as it was raised, in whatever process."""
    from ray.exceptions import RayTaskError

    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def is_out_of_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError"


def one_line(error: BaseException) -> str:
    from ray.exceptions import RayError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if isinstance(error, RayError) else " ".join(lines)  # Ray's last line is the error itself
