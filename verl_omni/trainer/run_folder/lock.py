"""One run at a time in a folder.

The kernel holds the lock and releases it however the process ends. The file says who has it, for the message, and for
file systems that do not share locks between machines.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from verl_omni.utils.json_files import parse

NAME = "run.lock"


class FolderInUse(ValueError):
    """One line about the run that has the folder."""


@contextmanager
def run_lock(folder: str | Path) -> Iterator[None]:
    """Hold the folder, or raise one line that says who does. Leaves nothing behind where nothing else was written."""
    folder = Path(folder).expanduser()
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _take(path)
    except OSError as error:  # a disk without a free byte, one that is read only
        raise ValueError(
            f'trainer.default_local_dir="{folder}" cannot be written to: {error.strerror}. Make room or choose another '
            "folder"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)
        for empty in made:
            try:
                empty.rmdir()
            except OSError:  # something was written there
                break


def _take(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        held = _lock(file)
        owner = _owner(file)
        if held and not _is_same(file, path):  # its owner has just removed it
            os.close(file)
            continue
        if not held or _may_live(owner):
            os.close(file)
            raise FolderInUse(_in_use(path, owner, held))
        if owner:
            print(f"The run of process {owner['pid']} in {path.parent} has ended without a word: taking over.")
        me = {"host": socket.gethostname(), "pid": os.getpid(), "since": datetime.now(timezone.utc).isoformat()}
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(me).encode(), 0)
        except OSError:
            path.unlink()
            os.close(file)
            raise
        return file


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise FolderInUse(
            f"the file system of trainer.default_local_dir has no locks ({error.strerror}): choose a folder on another"
        ) from error


def _owner(file: int) -> dict:
    """Who wrote the file; nobody where it is empty or half written."""
    try:
        owner = parse(os.pread(file, 4096, 0), NAME)
        return {"host": str(owner["host"]), "pid": int(owner["pid"]), "since": str(owner["since"])}
    except (ValueError, KeyError, TypeError):
        return {}


def _may_live(owner: dict) -> bool:
    """The kernel that gave us the lock knows that its owner here is gone. Of another machine it may know nothing."""
    return bool(owner) and owner["host"] != socket.gethostname()


def _is_same(file: int, path: Path) -> bool:
    try:
        return os.fstat(file).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _in_use(path: Path, owner: dict, held: bool) -> str:
    who = f"process {owner['pid']} on {owner['host']}, since {owner['since'][:19]} UTC" if owner else "another process"
    if not held:
        return f"{path.parent} is in use by a run of {who}: wait for it, or choose another trainer.experiment_name"
    return (
        f"{path.parent} is in use by a run of {who}, a machine that cannot be asked from here: if that run has ended, "
        f"delete {path}"
    )
