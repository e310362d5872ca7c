"""What a bad input is, how one is tried, and when it passes."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e_runs import settings
from tiny_models import tiny_checkpoint
from watch import Run, end_of, faults_of, left_behind, lines

EARLY, LATE = 30, 90  # seconds: for what can be seen before any worker starts, and for what only a run shows


@dataclass(frozen=True)
class BadInput:
    """`arguments` are added to a command that works; `{f}` in them is the case's folder.

    `says` are words that the line must hold; None: the last part of the first argument's key, and its value.
    `files` are written into the folder, `rows` become the training data, `model` spoils a copy of the model, `reward`
    is the source of the reward function, `earlier` prepares the run's folder.
    """

    theme: str
    name: str
    arguments: tuple[str, ...] = ()
    says: tuple[str, ...] | None = None
    files: dict[str, str | bytes] = field(default_factory=dict)
    rows: list[Any] | None = None
    model: Callable[[Path], None] | None = None
    reward: str | None = None
    earlier: Callable[[Path], None] | None = None
    early: bool = True  # False: only a running reward or worker can show it

    kind = "input"

    def words(self) -> tuple[str, ...]:
        if self.says is not None:
            return self.says
        key, _, value = self.arguments[0].partition("=")
        return (key.split(".")[-1].lstrip("+"), value.strip("[]"))


def row(prompt: Any = "a cat", source: Any = "jpeg_compressibility", **more: Any) -> dict[str, Any]:
    return {"data_source": source, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": ""}} | more


def attempt(case: BadInput, folder: Path) -> dict[str, Any]:
    """Type the command with this input in an empty folder, and judge what is seen."""
    arguments, run_dir = situation(case, folder), folder / "run"
    before = contents(run_dir)
    start = time.monotonic()
    run = Run(arguments, folder)
    code = end_of(run)
    seconds = time.monotonic() - start
    left = left_behind(folder)
    said = lines(run.output())
    why = faults_of(said)
    if code is None:
        why.append("hangs")
    if code == 0:
        why.append("is accepted")
    limit = EARLY if case.early else LATE
    if seconds > limit:
        why.append(f"takes more than {limit} s")
    why += [f'does not say "{word}"' for word in case.words() if word not in (said or [""])[-1]]
    if left:
        why.append(f"leaves {len(left)} processes behind: {left[0]}")
    after = contents(run_dir)
    kept = [name for name in before if name != "run.lock"]  # which names whoever asked last
    if case.early and (lost := [name for name in kept if after.get(name) != before[name]]):
        why.append(f"changes {lost[0]} of an earlier run")
    return {"seconds": seconds, "code": code, "line": (said or [""])[-1], "lines": len(said), "why": why}


def situation(case: BadInput, folder: Path) -> list[str]:
    """Make the files of a case; the arguments of its command."""
    folder.mkdir(parents=True)
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    extra, model = [], None
    if case.rows is not None:
        text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in case.rows)
        (folder / "prompts.jsonl").write_text(text)
        extra.append("data.train_files=prompts.jsonl")
    if case.model is not None:
        model = folder / "model"
        shutil.copytree(tiny_checkpoint(), model)
        case.model(model)
    if case.reward is not None:
        (folder / "reward.py").write_text(case.reward)
        extra.append("reward.custom_reward_function.path=reward.py")
    (case.earlier or unfinished)(folder / "run")
    return settings("run", *extra, *(a.replace("{f}", str(folder)) for a in case.arguments), model=model)


def unfinished(run_dir: Path) -> None:
    """The folder of an earlier run that came to no checkpoint."""
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 0, "data": {"val-core/x/reward/mean@1": 0.5}}\n')
    (run_dir / "config.yaml").write_text("recipe: an earlier run\n")


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file."""
    if not folder.is_dir():
        return {}
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
