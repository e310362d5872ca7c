"""What a checkpoint says of itself: its step, its files with their checksums, and the run that wrote it.

`manifest.json` is written last. A folder without one is no checkpoint. `manifest.sha256` beside it says whether it is
the one that was written (`sha256sum -c manifest.sha256`).
"""

import functools
import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from verl_omni.utils.json_files import read_object
from verl_omni.utils.regular_files import open_regular

NAME = "manifest.json"
CHECKSUM = "manifest.sha256"
FORMAT = 2
WITHOUT_CHECKSUM = 1  # a format of earlier versions, which is still read
BLOCK = 2**20
OVERWRITTEN = f"{NAME} is cut off or overwritten"


class CheckpointError(ValueError):
    """One line about a checkpoint that cannot be written or gone on from."""


def write(folder: Path, step: int, run: dict[str, Any]) -> None:
    """Describe the files below `folder`, and see to it that a power cut loses neither them nor this."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter's lock
        described = list(pool.map(_describe, paths))
    files = {path.relative_to(folder).as_posix(): entry for path, entry in zip(paths, described, strict=True)}
    manifest = {"format": FORMAT, "global_step": step, "run": run, "files": files}
    content = json.dumps(manifest, indent=1).encode()
    for name, text in ((CHECKSUM, f"{hashlib.sha256(content).hexdigest()}  {NAME}\n".encode()), (NAME, content)):
        (folder / name).write_bytes(text)
        flush(folder / name)
    for below in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        flush(below)


def read(folder: Path) -> dict[str, Any]:
    """The manifest, or one line on why this folder is no checkpoint."""
    if not os.path.lexists(folder / NAME):
        if (folder / "trainer.pt").is_file():
            raise CheckpointError(
                f"{folder} was written by an earlier version, as pickles, which can run code when they are read: this "
                "version does not read them. Start anew with trainer.resume_mode=disable"
            )
        raise CheckpointError(f"{folder} is no checkpoint: it holds no {NAME}")
    try:
        manifest = read_object(folder / NAME)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder} is damaged: {OVERWRITTEN} ({error})") from None
    known = manifest.get("format")
    if known not in (FORMAT, WITHOUT_CHECKSUM):
        words = f"has format {known}: this version reads format {FORMAT}" if known else f"is damaged: {OVERWRITTEN}"
        raise CheckpointError(f"{folder} {words}"[:400])
    if (known == FORMAT or has_checksum(folder)) and digest(folder) != _noted(folder):
        raise CheckpointError(f"{folder} is damaged: {NAME} does not have the content that {CHECKSUM} was written for")
    run = manifest.get("run")
    told = run if isinstance(run, dict) else {}
    if not all(isinstance(told.get(part), dict) for part in ("settings", "content")):
        raise CheckpointError(f"{folder} is damaged: {OVERWRITTEN} (it does not say of which run it is)")
    if folder.name != f"global_step_{manifest.get('global_step')}":
        raise CheckpointError(
            f"{folder} is damaged: {NAME} says that it is of step {str(manifest.get('global_step'))[:40]}, not that of "
            "the folder's name"
        )
    return manifest


def digest(folder: Path) -> str:
    """Of the manifest itself."""
    return _sha256(folder / NAME)


def has_checksum(folder: Path) -> bool:
    """Whether something claims to be one: it is compared whatever format the manifest says it has."""
    return os.path.lexists(folder / CHECKSUM)


def _noted(folder: Path) -> str:
    try:
        with open_regular(folder / CHECKSUM) as file:
            return file.read(200).decode(errors="replace").partition(" ")[0]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is damaged: {error}") from None


def check(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that is as it was written; all of it is read to know that."""
    manifest, place = read(folder), folder.absolute()
    try:
        fault = _fault(place, tuple((path, *_state(path)) for path in sorted(place.rglob("*"))))
    except OSError as error:  # of the disk, or files that this user may not read
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    if fault:
        raise CheckpointError(f"{folder} is damaged: {fault}")
    return manifest


def _state(path: Path) -> tuple[int, int, int]:
    """What changes with a file."""
    try:
        about = path.stat()
    except OSError:  # a broken link, or a loop of them
        about = path.lstat()
    return about.st_mode, about.st_size, about.st_mtime_ns


@functools.lru_cache(maxsize=16)  # the checks before a run and the run itself ask about the same one
def _fault(folder: Path, state: tuple) -> str | None:
    files = read(folder).get("files")
    if not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        return OVERWRITTEN
    for name, entry in files.items():
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts:
            return f"{NAME} names {name[:100]}, which lies outside"
        try:
            about = (folder / name).stat()
        except (OSError, ValueError):  # the latter for a null byte in the name
            return f"{name[:100]} is missing"
        if not stat.S_ISREG(about.st_mode):
            return f"{name[:100]} is no regular file"
        if about.st_size != entry["bytes"]:
            return f"{name[:100]} has {about.st_size} bytes and was written with {entry['bytes']}"
    named = {folder / name for name in files}
    named |= {parent for path in named for parent in path.parents}
    for path in (*(folder / "state").rglob("*"), *(folder / "rewriter/state").rglob("*")):  # all would be read
        if path not in named:
            return f"{path.relative_to(folder).as_posix()} was added to it"
    with ThreadPoolExecutor() as pool:
        found = pool.map(_sha256, (folder / name for name in files))
        for (name, entry), digest in zip(files.items(), found, strict=True):
            if digest != entry["sha256"]:
                return f"{name} does not have the content that was written"
    return None


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)


def _describe(path: Path) -> dict[str, Any]:
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
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
