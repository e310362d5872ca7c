"""What a run warns of, as alerts of the trackers that have them: these reach people who look at no console."""

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_omni.report.notices import FILE
from verl_omni.utils.json_files import parse_object

TITLE = 60  # characters: W&B takes fewer than 64


def to_wandb(wandb: Any, title: str, line: str) -> None:
    """Of several with the same title within a minute W&B sends one."""
    wandb.alert(title=title, text=line, level=wandb.AlertLevel.WARN)


def to_trackio(adapter: Any, title: str, line: str) -> None:
    adapter.trackio.alert(title=title, text=line, level=adapter.trackio.AlertLevel.WARN)


SENDERS: Mapping[str, Callable[[Any, str, str], None]] = {"wandb": to_wandb, "trackio": to_trackio}


class TrackerNotices:
    """Sends each line that comes into `notices.jsonl` from now on. A tracker that does not take one ends no run."""

    def __init__(self, run_dir: Path, trackers: Mapping[str, Any]):
        self.trackers = {name: tracker for name, tracker in trackers.items() if name in SENDERS}
        self._path = run_dir / FILE
        self._sent = self._path.stat().st_size if self._path.exists() else 0

    def send(self) -> None:
        if not self.trackers or not self._path.exists():
            return
        with self._path.open("rb") as lines:
            lines.seek(self._sent)
            new = lines.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._sent += len(whole)
        for line in whole.splitlines():
            said = str(parse_object(line.decode(), f"a line of {self._path}").get("line"))
            for name, tracker in self.trackers.items():
                try:
                    SENDERS[name](tracker, _title(said), said)
                except Exception as error:  # of a library and its network: anything
                    print(f"{name} did not take a warning: {type(error).__name__}: {error}", flush=True)


def _title(line: str) -> str:
    """How it begins, without its step."""
    before, _, words = line.partition(": ")
    return textwrap.shorten(words if before.startswith("step ") else line, TITLE, placeholder=" ...")
