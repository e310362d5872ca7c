"""What people ask of a run by a file in its folder, as `verl-omni watch` does. It is looked for between steps."""

from pathlib import Path

from verl_omni.trainer.interrupts import request_stop
from verl_omni.utils.run_files import SAVE, STOP


def forget(folder: Path) -> None:
    """What an earlier start was asked is not for this one."""
    for name in (STOP, SAVE):
        (folder / name).unlink(missing_ok=True)


def heed_stop(folder: Path) -> None:
    """As a Ctrl-C: the step that was done is saved, and the run ends."""
    if _taken(folder / STOP):
        request_stop()


def wants_save(folder: Path) -> bool:
    return _taken(folder / SAVE)


def _taken(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
