"""What a checkpoint says of itself: its step, its files with their checksums, and the run that wrote it.

`manifest.json` is written last. A folder without one is no checkpoint.
"""

import functools
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

NAME = "manifest.json"
FORMAT = 1
BLOCK = 2**20


class CheckpointError(ValueError):
    """One line about a checkpoint that cannot be written or gone on from."""


def write(folder: Path, step: int, run: dict[str, Any]) -> None:
    """Describe the files below `folder`, and see to it that a power cut loses neither them nor this."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter's lock
        described = list(pool.map(_describe, paths))
    files = {path.relative_to(folder).as_posix(): entry for path, entry in zip(paths, described, strict=True)}
    manifest = {"format": FORMAT, "global_step": step, "run": run, "files": files}
    path = folder / NAME
    path.write_text(json.dumps(manifest, indent=1))
    flush(path)
    for below in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        flush(below)


def read(folder: Path) -> dict[str, Any]:
    """The manifest, or one line on why this folder is no checkpoint."""
    path = folder / NAME
    if not path.is_file():
        if (folder / "trainer.pt").is_file():
            raise CheckpointError(
                f"{folder} was written by an earlier version, as pickles, which can run code when they are read: this "
                "version does not read them. Start anew with trainer.resume_mode=disable"
            )
        raise CheckpointError(f"{folder} is no checkpoint: it holds no {NAME}")
    try:
        manifest = json.loads(path.read_text())
        known = manifest["format"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{folder} is damaged: {NAME} is cut off or overwritten") from None
    if known != FORMAT:
        raise CheckpointError(f"{folder} has format {known}: this version reads format {FORMAT}")
    return manifest


def check(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that is as it was written; all of it is read to know that."""
    manifest = read(folder)
    state = ((path, path.stat()) for path in sorted(folder.resolve().rglob("*")) if path.is_file())
    fault = _fault(folder.resolve(), tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in state))
    if fault:
        raise CheckpointError(f"{folder} is damaged: {fault}")
    return manifest


@functools.lru_cache(maxsize=16)  # the checks before a run and the run itself ask about the same one
def _fault(folder: Path, state: tuple) -> str | None:
    try:
        files = {str(name): (int(e["bytes"]), str(e["sha256"])) for name, e in read(folder)["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return f"{NAME} is cut off or overwritten"
    for name, (size, _) in files.items():
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts:
            return f"{NAME} names {name}, which lies outside"
        if not (folder / name).is_file():
            return f"{name} is missing"
        found = (folder / name).stat().st_size
        if found != size:
            return f"{name} has {found} bytes and was written with {size}"
    for path in (folder / "state").rglob("*"):  # all tensor files there would be read
        if path.is_file() and path.relative_to(folder).as_posix() not in files:
            return f"{path.relative_to(folder).as_posix()} was added to it"
    with ThreadPoolExecutor() as pool:
        found = pool.map(_sha256, (folder / name for name in files))
        for (name, (_, expected)), digest in zip(files.items(), found, strict=True):
            if digest != expected:
                return f"{name} does not have the content that was written"
    return None


def _describe(path: Path) -> dict[str, Any]:
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """What a power cut must not lose is on the disk, not only in the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
