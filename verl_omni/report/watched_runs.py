"""What the live page shows of runs, as plain data: `web/watch.js` draws it."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from verl_omni.report import run_charts
from verl_omni.report.following import Follower
from verl_omni.report.galleries import file_of, read_samples
from verl_omni.report.notices import read_notices
from verl_omni.report.run import Run
from verl_omni.report.run_state import RunState, read_state
from verl_omni.report.summary import about, duration, facts, title_of
from verl_omni.utils.run_files import PROGRESS

MARKS = ("metrics.jsonl", PROGRESS)  # either makes a folder a run's
SHOWN = (
    *("metrics.jsonl", "timeline.jsonl", "notices.jsonl", "starts.jsonl", "config.yaml", "report.html"),
    *("latest_checkpointed_iteration.txt", "validation", "training"),
)
DEEPEST = 4  # folders below the one that is watched
LOG_LINES, LOG_BYTES = 200, 2**16
PICTURES = {
    **{".png": "image/png", ".gif": "image/gif", ".jpg": "image/jpeg", ".webp": "image/webp"},
    **{".mp4": "video/mp4", ".wav": "audio/wav"},
}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class WatchedRun:
    """One run's folder. All is read anew when it is asked for: the run may be going on, or be started again."""

    def __init__(self, name: str, folder: Path):
        self.name, self.dir = name, folder
        self._metrics = Follower(folder / "metrics.jsonl")
        self._told: dict[str, Any] | None = None

    @property
    def state(self) -> RunState:
        return read_state(self.dir)

    def brief(self) -> dict[str, Any]:
        """A line in a list of runs. `stamp` changes when there is more to see than where the run is."""
        stamp, state = self._stamp(), self.state
        if self._told is None or self._told["stamp"] != stamp:
            self._told = self._tell(stamp)
        left = self._time_left(state)
        return self._told | {"name": self.name, "state": vars(state), "left": left, "changed": self.changed()}

    def whole(self) -> dict[str, Any]:
        run = self._run()
        charts = {"Learning": run_charts.learning(run), "Time": run_charts.time(run), "Memory": run_charts.memory(run)}
        return {
            "name": self.name,
            "title": title_of(run, self.name),
            "facts": facts(run),
            "changes": [vars(change) for change in run.changes()],
            "charts": charts,
            "validations": [{"step": step, "score": self._score(run, step)} for step, _ in run.validations()],
            "training": self._training_steps(),
            "checkpoints": self._checkpoints(run),
            "warnings": self._warnings(run),
            "about": about(run),
            "command": run.starts[-1]["command"] if run.starts else None,
            "config": run.config,
            "report": (self.dir / "report.html").is_file(),
        }

    def samples(self, kind: str, step: int) -> list[dict[str, Any]]:
        """The images of a step with what their reward told."""
        folder = self.dir / kind / f"step_{step}"
        kept = ("index", "prompt", "ground_truth", "score", "seed", "kind", "text", "reward_extra_info")
        return [
            {key: row.get(key) for key in kept} | {"file": f"{kind}/step_{step}/{file_of(row)}"}
            for row in read_samples(folder)
        ]

    def picture(self, name: str) -> tuple[Path, str]:
        """(file, its kind) of an image in the run's folder; ValueError for anything else, wherever a link may lead."""
        path = Path(os.path.realpath(self.dir / name.replace("\0", "")))  # of a loop of links: itself, which is no file
        kind = PICTURES.get(path.suffix.lower())
        inside = any(path.is_relative_to(self.dir.resolve() / place) for place in ("validation", "training"))
        if kind is None or not inside or not os.path.isfile(path):
            raise ValueError(f"{name[:100]} is no image of this run")
        return path, kind

    def log(self) -> str:
        """The last lines of run.log, as a terminal would show them."""
        path = self.dir / "run.log"
        if not path.is_file() or path.is_symlink():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            text = ESCAPES.sub("", file.read().decode(errors="replace"))
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
        return "\n".join(lines[-LOG_LINES:])

    def ask(self, file: str) -> bool:
        """Leave a wish for the run; False where nobody would see it."""
        if not self.state.listens:
            return False
        try:
            os.close(os.open(self.dir / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644))
        except FileExistsError:  # asked before, and not seen yet
            pass
        return True

    def _run(self) -> Run:
        return Run(self.dir, self._metrics.entries())

    def _tell(self, stamp: str) -> dict[str, Any]:
        run = self._run()
        named = [*run.names("val-core/")[:1], "critic/rewards/mean"]
        scores = [curve[-1][1] for curve in map(run.curve, named) if curve]
        seconds = [value for _, value in run.curve("perf/time_per_step")[-10:]]
        return {
            "stamp": stamp,
            "title": title_of(run, self.name),
            "step": run.entries[-1]["step"] if run.entries else 0,
            "score": scores[0] if scores else None,
            "seconds": sum(seconds) / len(seconds) if seconds else None,
        }

    def _stamp(self) -> str:
        """Of all that is shown, but for progress.json, which changes several times a step."""
        stamps = [f"{s.st_ino}.{s.st_size}.{s.st_mtime_ns}" for s in map(_about, (self.dir / n for n in SHOWN)) if s]
        return hashlib.sha256(" ".join(stamps).encode()).hexdigest()[:16]

    def changed(self) -> float:
        return max((found.st_mtime for found in map(_about, (self.dir / mark for mark in MARKS)) if found), default=0.0)

    def _warnings(self, run: Run) -> list[str]:
        lines = read_notices(self.dir)
        for name in ["reward/failed", *(name for name in run.names("val-aux/") if name.endswith("/failed"))]:
            failed = [(step, count) for step, count in run.curve(name) if count]
            where = "rewards" if name == "reward/failed" else f"rewards of validation ({name.split('/')[1]})"
            if failed:
                lines.append(f"{sum(n for _, n in failed):.0f} {where} failed, the last ones at step {failed[-1][0]}")
        if self._metrics.unreadable:
            lines.append(f"{self._metrics.unreadable} lines of metrics.jsonl cannot be read and are left out")
        return lines

    def _training_steps(self) -> list[int]:
        files = self.dir.glob("training/step_*/samples.jsonl")
        return sorted(int(file.parent.name.removeprefix("step_")) for file in files)

    def _checkpoints(self, run: Run) -> list[dict[str, Any]]:
        """Those that are whole, with the score of the validation at their step."""
        folders = (path.parent for path in self.dir.glob("global_step_*/manifest.json"))
        steps = {int(folder.name.removeprefix("global_step_")): folder for folder in folders}
        return [
            {
                "step": step,
                "folder": str(folder),
                "score": self._score(run, step),
                "in_between": (folder / "in_between.txt").exists(),
            }
            for step, folder in sorted(steps.items())
        ]

    @staticmethod
    def _score(run: Run, step: int) -> float | None:
        """The mean of what validation told at that step."""
        scores = [dict(run.curve(name)).get(step) for name in run.names("val-core/")]
        known = [score for score in scores if score is not None]
        return sum(known) / len(known) if known else None

    def _time_left(self, state: RunState) -> str | None:
        seconds = self._told["seconds"]
        if state.word != "running" or seconds is None or state.total < state.step:
            return None
        return duration(seconds * (state.total - state.step + 1))


def _about(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # not there (yet), or a loop of links
        return None


class WatchedFolder:
    """A run, or a folder with runs below it; those that come later are found too."""

    def __init__(self, folder: Path):
        self.dir = folder.resolve()
        self._runs: dict[str, WatchedRun] = {}

    def runs(self) -> dict[str, WatchedRun]:
        """By name, the last one that was written first. Links are not followed: they may lead anywhere."""
        found = {}
        for place, below, files in os.walk(self.dir):
            folder = Path(place)
            if any(mark in files for mark in MARKS):
                name = folder.relative_to(self.dir).as_posix() if folder != self.dir else self.dir.name
                found[name] = self._runs.get(name) or WatchedRun(name, folder)
                below.clear()
            elif len(folder.relative_to(self.dir).parts) >= DEEPEST:
                below.clear()
            below[:] = sorted(name for name in below if not name.startswith((".", "global_step_")))
        self._runs = dict(sorted(found.items(), key=lambda item: -item[1].changed()))
        return self._runs
