"""Where a run is, known to the process that watches it too, so that the end of any process can be put in words."""

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

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
    done: int = 0
    saves: bool = True  # not with trainer.save_freq=0
    report: str | None = None  # where it is, once the run has ended and written it
    over: int | None = None  # the exit code, once there is nothing left to do but to end
    last: str | None = None  # and what is then to be said, should the ending hang

    def where(self) -> str:
        return f"{self.stage} of step {self.step}" if self.step else self.stage


progress = Progress()
_watcher: int | None = None  # where the process that watches this one listens


def report_to(pipe: int) -> None:
    global _watcher
    _watcher = pipe


def is_watched() -> bool:
    return _watcher is not None


def tell(**changes: Any) -> None:
    """Note where the run is now."""
    for name, value in changes.items():
        setattr(progress, name, value)
    if _watcher is not None:
        os.write(_watcher, json.dumps(dataclasses.asdict(progress)).encode() + b"\n")


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
