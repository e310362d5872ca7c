"""How a run is, seen from outside: running, ended, or gone without a word."""

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_omni.report.summary import duration
from verl_omni.utils.json_files import read_object
from verl_omni.utils.run_files import PROGRESS

STOPPED = (129, 130, 143)  # exit codes of a run that was asked to end
SILENT_AFTER = 30.0  # seconds


@dataclass(frozen=True)
class RunState:
    """`word` is one of running, finished, stopped, failed, gone and unknown; `line` says it to a person."""

    word: str
    line: str
    step: int = 0
    total: int = 0

    @property
    def listens(self) -> bool:
        """Whether a wish will be seen."""
        return self.word == "running"


def read_state(run_dir: Path) -> RunState:
    path = run_dir / PROGRESS
    if not path.is_file():
        return RunState("unknown", "of an earlier version, or not started yet: there is no progress.json")
    try:
        said = read_object(path)
        return _state(said, int(said["step"]), int(said["total"]))
    except (ValueError, KeyError, TypeError, OSError) as error:
        return RunState("unknown", f"progress.json cannot be read: {error}"[:300])


def _state(said: dict[str, Any], step: int, total: int) -> RunState:
    over, words = said["over"], said.get("words") or said.get("last")
    if over == 0:
        return RunState("finished", "finished", step, total)
    if over is not None:
        return RunState("stopped" if over in STOPPED else "failed", str(words or f"ended with {over}"), step, total)
    at = f"{said['stage']} of step {step} of {total}" if step else str(said["stage"])
    process, since = said["process"], max(0.0, time.time() - float(said["time"]))
    here = process["host"] == socket.gethostname()
    if here and not _is_there(process):
        return RunState("gone", f"gone without a word during the {at}", step, total)
    silent = f", for {duration(since)}" if since > SILENT_AFTER else ""
    elsewhere = "" if here else f", on {process['host']}"
    return RunState("running", f"{at}{silent}{elsewhere}", step, total)


def _is_there(process: dict[str, Any]) -> bool:
    import psutil

    try:
        found = psutil.Process(int(process["pid"]))
        return abs(found.create_time() - float(process["began"])) < 2 and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
