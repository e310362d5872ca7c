"""Several settings on one GPU at once, each in its own process: they compile beside each other, and are timed alone.

Most of the time of a measurement is imports, building and compiling, which leave the GPU idle. As many settings as its
memory holds do that together. Then each has the GPU to itself for the step that is timed.
"""

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

GIB = 2**30
FORK = get_context("fork")
OVERTAKING = 3
CONTEXT = 1.0  # GiB of the GPU that a process takes beside its tensors


class Turns:
    """`with turns.together():` beside others, `with turns.alone():` with nobody else; who waits for it is next."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder  # None: there is nobody else

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            with self._locked("gate", fcntl.LOCK_EX):
                held.enter_context(self._locked("gpu", fcntl.LOCK_SH))
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._locked("gate", fcntl.LOCK_EX), self._locked("gpu", fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def _locked(self, name: str, how: int) -> Iterator[None]:
        if self.folder is None:
            yield
            return
        with open(self.folder / name, "a") as file:
            fcntl.flock(file, how)
            yield


NOBODY_ELSE = Turns()


@dataclass(frozen=True)
class Setting:
    """`work(*given, turns)` returns its figures. It gets so much memory of the GPU, and so many seconds."""

    name: str
    gib: float
    work: Callable[..., dict[str, Any]]
    given: tuple[Any, ...]
    seconds: float = 540.0  # waiting for others counts


def run_all(settings: list[Setting], folder: Path, gib: float, seconds: float, at_once: int = 4) -> dict[str, Any]:
    """In this order, whatever fits beside those that run; one that does not fit is overtaken OVERTAKING times at
    most. One that fails, or takes too long, leaves the others alone.

    All figures are written to `folder/found.json` after each. What each prints goes to a file of its own there. None is
    begun once the seconds are up, and those that run are ended. What an earlier call has found there is kept, and not
    measured again: the next one goes on with what is missing.
    """
    began = time.monotonic()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    before = json.loads((folder / "found.json").read_text()) if (folder / "found.json").exists() else {}
    found = {name: figures for name, figures in before.items() if "error" not in figures}
    waiting, running = [setting for setting in settings if setting.name not in found], {}
    overtaken: Counter[str] = Counter()
    while waiting or running:
        left = seconds - (time.monotonic() - began)
        for setting in list(waiting):
            ahead = waiting[: waiting.index(setting)]
            if left <= 0 or len(running) == at_once or any(overtaken[one.name] == OVERTAKING for one in ahead):
                break
            free = gib - sum(other.gib + CONTEXT for other, _ in running.values())
            if not running or setting.gib + CONTEXT <= free:
                waiting.remove(setting)
                overtaken.update(one.name for one in ahead)
                _answer(folder, setting).unlink(missing_ok=True)  # of an earlier call
                process = FORK.Process(target=_work, args=(setting, folder))
                process.start()
                running[process] = setting, time.monotonic()
        if left <= 0:
            found |= {setting.name: {"error": "not begun: the time was up"} for setting in waiting}
            _keep(folder, found)
            waiting.clear()
        time.sleep(0.1)
        for process, (setting, since) in list(running.items()):
            late = left <= 0 or time.monotonic() - since > setting.seconds
            if process.is_alive() and not late:
                continue
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
            process.join()
            del running[process]
            answer = _answer(folder, setting)
            took = time.monotonic() - since
            found[setting.name] = json.loads(answer.read_text()) if answer.exists() else {
                "error": f"ended after {took:.0f} s" if late else f"exit code {process.exitcode}"}  # fmt: skip
            found[setting.name]["all in all s"] = took
            _keep(folder, found)
            print(f"[{time.monotonic() - began:4.0f} s] {setting.name}: {_short(found[setting.name])}", flush=True)
    return found


def _keep(folder: Path, found: dict[str, Any]) -> None:
    """Whole or not at all: this process may be killed at any time."""
    unfinished = folder / "found.tmp"
    unfinished.write_text(json.dumps(found, indent=1))
    unfinished.replace(folder / "found.json")


def _short(figures: dict[str, Any]) -> str:
    shown = {k: v for k, v in figures.items() if not k.startswith(("timing", "perf", "first "))}
    return ", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())


def _answer(folder: Path, setting: Setting) -> Path:
    return folder / "logs" / f"{_file(setting)}.json"


def _file(setting: Setting) -> str:
    return "".join(c if c.isalnum() else "_" for c in setting.name)


def _work(setting: Setting, folder: Path) -> None:
    os.setsid()
    log = os.open(folder / "logs" / f"{_file(setting)}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        import torch

        if torch.cuda.is_available():
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, setting.gib * GIB / whole))
        figures = setting.work(*setting.given, Turns(folder))
    except BaseException as error:
        traceback.print_exc()
        figures = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:400]}
    unfinished = folder / "logs" / f"{_file(setting)}.tmp"
    unfinished.write_text(json.dumps(figures))
    unfinished.replace(unfinished.with_suffix(".json"))
    sys.stdout.flush()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(0, signal.SIGKILL)  # a trainer's threads would be waited for, and compilers stay
