"""The checkpoints of a run's folder: each is whole or not there, and all are of one run.

A checkpoint is written under a temporary name and renamed when every part of it is on disk. A run that was killed in
the middle of a save leaves only a temporary folder, which the next save removes.

`latest_checkpointed_iteration.txt` names the step to go on from and, in a second line, the checksum of its manifest; 0
is a run that has none yet. A run that starts from nothing, or from an earlier step, first moves what is not its own
past to `earlier_N`.
"""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_omni.trainer.run_folder import manifest
from verl_omni.trainer.run_folder.manifest import CheckpointError
from verl_omni.utils.json_files import read_object
from verl_omni.utils.regular_files import open_regular

STEP = re.compile(r"global_step_(\d+)")
LATEST = "latest_checkpointed_iteration.txt"
TRAINER = "trainer.json"  # in a checkpoint: where in the data the run is
BEST = "best_checkpointed_iteration.txt"  # the step with the best validation, and its score
IN_BETWEEN = "in_between.txt"  # in a checkpoint that no trainer.save_freq asked for
MODES = ("auto", "auto_previous", "disable", "resume_path")
# What else in a run's folder tells of the run, and moves with its checkpoints.
RECORDS = (
    *("config*.yaml", "metrics.jsonl", "order.jsonl", "timeline.jsonl", "notices.jsonl", "starts.jsonl"),
    *("validation", "training", "report.html", BEST),
)


def whole_checkpoints(folder: str | Path) -> dict[int, Path]:
    """Step -> folder, in ascending order. Nobody has looked into their files yet."""
    return {step: path for step, path in _steps(folder).items() if (path / manifest.NAME).is_file()}


def _steps(folder: str | Path) -> dict[int, Path]:
    found = {}
    for path in Path(folder).glob("global_step_*"):
        match = STEP.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


# ---- writing -----------------------------------------------------------------------------------------


@contextmanager
def publish(
    folder: str | Path, step: int, run: dict[str, Any], keep: int | None = None, best: float | None = None
) -> Iterator[Path]:
    """Write into the folder that this yields; it gets its name only if the block ends without an error.

    `run` says what wrote it, for a later start to compare itself with. `best` is its score where it is the best.
    """
    unpublished = Unpublished(folder, step, run, keep, best)
    with unpublished.writing() as place:
        yield place
    unpublished.publish()


class Unpublished:
    """A checkpoint that is being written. Arguments are as of `publish`."""

    def __init__(
        self, folder: str | Path, step: int, run: dict[str, Any], keep: int | None = None, best: float | None = None
    ):
        self.folder, self.step, self.run, self.keep, self.best = Path(folder), step, run, keep, best
        self.place = self.folder / f".writing_global_step_{step}"
        self.folder.mkdir(parents=True, exist_ok=True)
        for rest in self.folder.glob(".*_global_step_*"):  # what a killed run left behind
            shutil.rmtree(rest)
        self.place.mkdir()

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Whoever writes some of it; after an error nothing of it is left."""
        try:
            yield self.place
        except Exception as error:
            shutil.rmtree(self.place, ignore_errors=True)  # the error that is told is the one that came first
            if _is_full(error):
                raise CheckpointError(f"the disk of {self.folder} is full: {_last_whole(self.folder)}") from error
            raise

    def publish(self) -> Path:
        """All of it is there: it gets its name."""
        with self.writing():
            manifest.write(self.place, self.step, self.run)
        final = self.folder / f"global_step_{self.step}"
        if final.exists():
            remove(final)
        self.place.rename(final)
        _set_latest(self.folder, self.step)
        if self.best is not None:
            _write(self.folder / BEST, f"{self.step}\n{self.best!r}\n")
        if self.keep is not None:  # of those that were asked for; one in between is replaced by the next
            asked_for = [p for p in whole_checkpoints(self.folder).values() if not (p / IN_BETWEEN).exists()]
            for old in asked_for[: -self.keep]:
                if old.name != f"global_step_{best_step(self.folder)}":
                    remove(old)
        return final


def best_step(folder: Path) -> int | None:
    """The step whose checkpoint `trainer.keep_best` keeps; None where there is none."""
    step, _ = read_best(folder)
    return step


def read_best(folder: str | Path) -> tuple[int | None, float]:
    """(the step with the best validation, its score); (None, -infinity) where none is kept."""
    try:
        with open_regular(Path(folder) / BEST) as file:
            step, score = file.read(1000).decode("ascii", errors="replace").split()
        return int(step), float(score)
    except FileNotFoundError:
        return None, -math.inf
    except ValueError:
        raise CheckpointError(
            f"{Path(folder) / BEST} names no step and score: delete it, or write both into it"
        ) from None


def write_data_state(checkpoint: Path, state: dict[str, Any], validation_due: bool = False) -> None:
    due = {"validation_due": True} if validation_due else {}
    (checkpoint / TRAINER).write_text(json.dumps({"data": state} | due))


def validation_is_due(checkpoint: Path) -> bool:
    """Whether the run ended before its step was validated, and nobody has done it since."""
    due = read_object(checkpoint / TRAINER).get("validation_due", False)
    step = STEP.fullmatch(checkpoint.name)[1]
    return due and not (checkpoint.parent / "validation" / f"step_{step}" / "samples.jsonl").exists()


def data_state(checkpoint: Path) -> dict[str, Any]:
    """Where in the data a run goes on from there."""
    state = read_object(checkpoint / TRAINER).get("data")
    if not isinstance(state, dict):
        raise CheckpointError(f"{checkpoint / TRAINER} does not say where in the data the run was")
    return state


def check_all_seen(place: Path, seen: list[dict[str, int]]) -> None:
    """What ranks see of a checkpoint that they have written is here, as long as there: else one of them wrote it to
    another disk, or to one that has not shown all of it yet, and what is here would be taken for the whole."""
    shared = f'trainer.default_local_dir="{place.parent}" has to be on a disk that all nodes share'
    for rank, files in enumerate(seen):
        for name, size in files.items():
            here = _size(place / name)
            if here is None:
                raise CheckpointError(
                    f"rank {rank} has written {name} of a checkpoint to a disk that the trainer does not see: {shared}"
                )
            if here < size:  # others may see less of what is just being shown to them, and its writer sees all
                raise CheckpointError(
                    f"rank {rank} sees {size} bytes of {name} of a checkpoint, and the trainer {here}: {shared}, and "
                    "that shows each all that another has written"
                )


def _size(path: Path) -> int | None:
    """Of a file that is opened: a network's disk then asks again what it may have kept of it."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size


def check_room(folder: Path, needed: int) -> None:
    """Refuse to begin a checkpoint that the disk has no room for."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"a checkpoint needs {_gigabytes(needed)} and the disk of {folder} has {_gigabytes(free)} left: "
            f"{_last_whole(folder)}"
        )


def _last_whole(folder: Path) -> str:
    whole = list(whole_checkpoints(folder).values())
    state = f"the last whole checkpoint is {whole[-1]}" if whole else "no checkpoint is there yet"
    return f"{state}. Make room, or keep fewer (trainer.max_ckpt_to_keep), and start the same command again"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e7 else f"{count / 1e6:.3g} MB"


def _is_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind an error, which may come from another process or from safetensors' own code."""
    full = (errno.ENOSPC, errno.EDQUOT)
    while error is not None:
        if isinstance(error, OSError) and error.errno in full or any(f"os error {n})" in str(error) for n in full):
            return True
        error = getattr(error, "cause", None) or error.__cause__
    return False


def _set_latest(folder: Path, step: int) -> None:
    _write(folder / LATEST, f"{step}\n{manifest.digest(folder / f'global_step_{step}')}\n" if step else "0\n")


def _write(path: Path, text: str) -> None:
    """As a whole or not at all."""
    writing = path.with_name(f".{path.name}")
    writing.write_text(text)
    manifest.flush(writing)
    writing.replace(path)
    manifest.flush(path.parent)


def remove(checkpoint: Path) -> None:
    """Take its name away first: a checkpoint that is half deleted must not look whole."""
    going = checkpoint.with_name(f".removing_{checkpoint.name}")
    checkpoint.rename(going)
    shutil.rmtree(going)


def begin(folder: str | Path, source: Path | None) -> None:
    """Make the folder that of a run which goes on from `source`, or starts from nothing (None).

    Checkpoints that are not its past are moved away: no later start may take them for its own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    here = source is not None and source.resolve().parent == folder.resolve()
    step = int(STEP.fullmatch(source.name)[1]) if here else 0
    others = [path for number, path in _steps(folder).items() if number > step and any(path.iterdir())]
    records = [path for pattern in RECORDS for path in folder.glob(pattern)] if others and not here else []
    moved = [*records, *others]
    if moved:
        count = 1
        while (earlier := folder / f"earlier_{count}").exists():
            count += 1
        earlier.mkdir()
        names = ", ".join(path.name for path in others)
        print(f"This run does not go on from {names}: moved to {earlier}, where nothing reads it.", flush=True)
        if not here and (folder / LATEST).exists():
            shutil.copy2(folder / LATEST, earlier)
    _set_latest(folder, step)  # first: from now on nobody takes the others for this run's
    for path in moved:
        path.rename(earlier / path.name)
    if (best_step(folder) or 0) > step:
        (folder / BEST).rename(earlier / BEST) if moved else (folder / BEST).unlink()


# ---- finding -----------------------------------------------------------------------------------------


def find_resume(folder: str | Path, mode: str, path: str | None) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, checked, or None for a start from nothing; and what the user should know."""
    if mode == "disable":
        return None, []
    if mode == "resume_path":
        chosen = _named(path)
        return chosen, _check(chosen)
    if mode not in MODES:
        raise ValueError(f'trainer.resume_mode="{mode}": expected {", ".join(MODES[:-1])} or {MODES[-1]}')
    folder = Path(folder).expanduser()
    whole, notices = whole_checkpoints(folder), []
    latest, digest = _read_latest(folder, whole)
    for step, other in _steps(folder).items():
        if step not in whole and step != latest:
            if not whole and (other / "trainer.pt").is_file():
                manifest.read(other)  # says what it is
            notices.append(f"{other} is no checkpoint (it holds no {manifest.NAME}) and is passed over.")
    if latest == 0:
        return None, notices
    chosen = folder / f"global_step_{latest}"
    before = [whole[step] for step in reversed(whole) if step < latest]
    try:
        if not chosen.is_dir():
            raise CheckpointError(f"{folder / LATEST} names {chosen.name}, which is not there")
        return chosen, notices + _check(chosen, digest)
    except CheckpointError as error:
        if mode == "auto":
            way = f"go on from {before[0]} with trainer.resume_mode=auto_previous, or " if before else ""
            raise CheckpointError(f"{error}: {way}start anew with trainer.resume_mode=disable") from None
        notices.append(f"{error}.")
    for earlier in before:
        try:
            return earlier, notices + _check(earlier)
        except CheckpointError as error:
            notices.append(f"{error}.")
    raise CheckpointError(
        f"{' '.join(notices)} No whole checkpoint is left: start anew with trainer.resume_mode=disable"
    )


def _check(checkpoint: Path, digest: str | None = None) -> list[str]:
    """Raise one line where a checkpoint is not as it was written; what the user should know of it otherwise."""
    made = manifest.check(checkpoint)
    if digest is not None and digest != manifest.digest(checkpoint):
        raise CheckpointError(
            f"{checkpoint} is damaged: {manifest.NAME} is not the one whose checksum is in "
            f"{checkpoint.with_name(LATEST)}"
        )
    if made["format"] == manifest.WITHOUT_CHECKSUM and not manifest.has_checksum(checkpoint):
        return [f"{checkpoint} was written by an earlier version, which left no checksum of {manifest.NAME} itself."]
    return []


def _read_latest(folder: Path, whole: dict[int, Path]) -> tuple[int, str | None]:
    """The step, and the checksum of its manifest where there is one: earlier versions and people write none."""
    try:
        with open_regular(folder / LATEST) as file:
            step, *digest = file.read(1000).decode("ascii", errors="replace").split() or [""]
    except FileNotFoundError:
        if not whole:
            return 0, None
        step, digest = None, []
    if step is None or not re.fullmatch("[0-9]{1,18}", step) or len(digest) > 1:
        newest = next(reversed(whole.values()), folder / "global_step_N")
        raise CheckpointError(
            f"{folder / LATEST} {'is missing' if step is None else 'names no step'}: name the checkpoint to go on from "
            f"with trainer.resume_mode=resume_path trainer.resume_from_path={newest}, or start anew with "
            "trainer.resume_mode=disable"
        )
    return int(step), next(iter(digest), None)


def _named(path: str | None) -> Path:
    if not path:
        raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path=<a global_step_N folder>")
    chosen = Path(path).expanduser()
    if not STEP.fullmatch(chosen.name) or not chosen.is_dir():
        raise CheckpointError(
            f'trainer.resume_from_path="{path}" is no checkpoint: expected a global_step_N folder that a run wrote'
        )
    return chosen
