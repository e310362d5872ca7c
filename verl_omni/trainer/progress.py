"""Where a run is, known to the process that watches it too, so that the end of any process can be put in words.

The same stands in `progress.json` of the run's folder, for whoever looks from outside.
"""

import dataclasses
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from verl_omni.utils.run_files import PROGRESS

# The timers of a step, as a person would call them.
WORDS = {
    "step": "training",
    "gen": "rollout",
    "ref": "reference pass",
    "old_log_prob": "old log-probabilities",
    "reward": "rewards",
    "adv": "advantages",
    "update_actor": "update",
    "testing": "validation",
    "save_checkpoint": "saving",
}


@dataclass
class Progress:
    """What the last words of a run need: its folder, what it was at, and how many steps it has done by itself."""

    run_dir: str | None = None
    resume_mode: str = "auto"
    stage: str = "start"
    step: int = 0
    total: int = 0
    done: int = 0
    saves: bool = True  # not with trainer.save_freq=0
    report: str | None = None  # where it is, once the run has ended and written it
    over: int | None = None  # the exit code, once there is nothing left to do but to end
    last: str | None = None  # and what is then to be said, should the ending hang
    words: str | None = None  # the last ones, of a run that did not come to its end

    def where(self) -> str:
        return f"{self.stage} of step {self.step}" if self.step else self.stage


# Until the first image is drawn a person waits for these, by the stage that the run is at.
WAITED_FOR = {
    "start of Ray": "starting Ray",
    "loading of the model": "loading the model, starting the rewards",
    "validation": "drawing the first images, for validation",
    "rollout": "drawing the first images",
}
DRAWS = ("validation", "rollout")

progress = Progress()
_began: float | None = None  # when the command was typed, as long as it is to be said what it waits for
_draws = False  # the last that it waits for is the first images
_screen: Callable[[], TextIO] | None = None
_watcher: int | None = None  # where the process that watches this one listens


def report_to(pipe: int) -> None:
    global _watcher
    _watcher = pipe


def report_to_nobody() -> None:
    """For a fork that is not the run: as long as it had the pipe, whoever listens would wait for its reports."""
    global _watcher
    if _watcher is not None:
        os.close(_watcher)
    _watcher = None


def is_watched() -> bool:
    return _watcher is not None


def say_what_is_waited_for(screen: Callable[[], TextIO]) -> None:
    """With the seconds since now, from here on to the first image."""
    global _began, _screen, _draws
    _began, _screen, _draws = perf_counter(), screen, False


def name_stage(stage: str, words: str) -> None:
    """Say more of a stage than its name: how much is loaded."""
    WAITED_FOR[stage] = words


def _say(words: str) -> None:
    print(f"{perf_counter() - _began:5.1f} s  {words}", file=_screen(), flush=True)


def first_images(compiling_seconds: Callable[[], float]) -> None:
    """Images are there. Of the first ones it is said how long they waited for a compiler, if they did."""
    global _began
    if _began is not None and (seconds := compiling_seconds()) >= 0.1:
        _say(f"the first images are there; {seconds:.1f} s of this went into compiling")
    _began = None


def tell(**changes: Any) -> None:
    """Note where the run is now."""
    global _draws
    stage = changes.get("stage")
    if _began is not None and not _draws and stage in WAITED_FOR and stage != progress.stage:
        _say(WAITED_FOR[stage])
        _draws = stage in DRAWS
    for name, value in changes.items():
        setattr(progress, name, value)
    if _watcher is not None:
        os.write(_watcher, json.dumps(dataclasses.asdict(progress)).encode() + b"\n")
    if progress.run_dir is not None:
        write_progress(progress, _process(os.getpid()))


def write_progress(progress: Progress, process: dict[str, Any] | None) -> None:
    """Into the run's folder. What cannot be written is no reason to end a run."""
    path = Path(progress.run_dir, PROGRESS)
    said = dataclasses.asdict(progress) | {"process": process, "time": time.time()}
    try:
        new = path.with_suffix(".tmp")
        new.write_text(json.dumps(said))
        new.replace(path)
    except OSError as error:
        with suppress(OSError):  # the log lies on the same disk
            print(f"{path} cannot be written: {error}", file=sys.stderr, flush=True)


@functools.cache
def _process(pid: int) -> dict[str, Any]:
    """Enough to know later whether it is still there."""
    import psutil

    return {"host": socket.gethostname(), "pid": pid, "began": psutil.Process(pid).create_time()}


class Stages(dict[str, float]):
    """Seconds of each stage of a step, and when each began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[str, float, float]] = []


@contextmanager
def timer(timing: dict[str, float], name: str) -> Iterator[None]:
    """Seconds of a stage. A stage that fails stays the one that the run was at."""
    start, outer = perf_counter(), progress.stage
    tell(stage=WORDS.get(name, name))
    yield
    tell(stage=outer)
    end = perf_counter()
    timing[name] = timing.get(name, 0.0) + end - start
    if isinstance(timing, Stages):
        timing.spans.append((name, start, end))
