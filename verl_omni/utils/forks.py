"""Several pieces of work of this process at once, each in a copy of it."""

import contextlib
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any


def in_forks(work: Sequence[Callable[[], Any]], at_once: int | None = None) -> list[Any]:
    """What each gives; what it changes is lost. As many at once as there are cores, in one thread each.

    One that fails is done again here, where its error is raised.
    """
    at_once = at_once or len(os.sched_getaffinity(0))
    if at_once == 1 or len(work) == 1:
        return [one() for one in work]
    found: list[Any] = []
    for begin in range(0, len(work), at_once):
        now = work[begin : begin + at_once]
        running = [_start(one) for one in now]
        found += [_result(pid, pipe, one) for (pid, pipe), one in zip(running, now, strict=True)]
    return found


def _start(work: Callable[[], Any]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    code = 1
    with contextlib.suppress(BaseException):  # whoever waits does it again, and sees why
        import torch

        torch.set_num_threads(1)  # those of the process that was copied are not here
        with open(writer, "wb") as pipe:
            pickle.dump(work(), pipe)
        code = 0
    os._exit(code)


def _result(pid: int, reader: int, work: Callable[[], Any]) -> Any:
    with open(reader, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    return pickle.loads(said) if status == 0 else work()
