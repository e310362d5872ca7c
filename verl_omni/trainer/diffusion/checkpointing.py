"""Checkpoints that are either whole or not there.

A checkpoint is written under a temporary name and renamed when every part of it is on disk. A run that was killed in
the middle of a save leaves only a temporary folder, which the next save removes.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = re.compile(r"global_step_(\d+)")
LATEST = "latest_checkpointed_iteration.txt"


def whole_checkpoints(folder: str | Path) -> dict[int, Path]:
    """Step -> folder, in ascending order."""
    found = {}
    for path in Path(folder).glob("global_step_*"):
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


@contextmanager
def publish(folder: str | Path, step: int, keep: int | None = None) -> Iterator[Path]:
    """Write into the folder that this yields; it gets its name only if the block ends without an error."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for rest in folder.glob(".*_global_step_*"):  # what a killed run left behind
        shutil.rmtree(rest)
    writing = folder / f".writing_global_step_{step}"
    writing.mkdir()
    yield writing
    _flush(writing)
    final = folder / f"global_step_{step}"
    if final.exists():
        _remove(final)
    writing.rename(final)
    latest = folder / f".{LATEST}"
    latest.write_text(str(step))
    latest.replace(folder / LATEST)
    _flush_folder(folder)
    if keep is not None:
        older = [path for number, path in whole_checkpoints(folder).items() if number < step]
        for old in older[: len(older) - (keep - 1)]:
            _remove(old)


def find_resume(folder: str | Path, mode: str, path: str | None) -> Path | None:
    """The checkpoint to go on from, or None for a start from nothing."""
    if mode == "disable":
        return None
    if mode == "auto":
        return next(reversed(whole_checkpoints(folder).values()), None)
    if mode != "resume_path":
        raise ValueError(f'trainer.resume_mode="{mode}": expected auto, disable or resume_path')
    if not path:
        raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path=<a global_step_N folder>")
    chosen = Path(path).expanduser()
    if not NAME.fullmatch(chosen.name) or not (chosen / "trainer.pt").is_file():
        raise ValueError(
            f'trainer.resume_from_path="{path}" is no checkpoint: expected a global_step_N folder that a run wrote'
        )
    return chosen


def _remove(checkpoint: Path) -> None:
    """Take its name away first: a checkpoint that is half deleted must not look whole."""
    going = checkpoint.with_name(f".removing_{checkpoint.name}")
    checkpoint.rename(going)
    shutil.rmtree(going)


def _flush(folder: Path) -> None:
    """What a power cut must not lose is on the disk, not only in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.fsync(f.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
