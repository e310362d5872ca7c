"""The command as a user types it, and what can be seen of it from outside: its lines, its end, who is left."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from e2e_runs import Run

LONGEST_LINE = 450  # what a person reads at once
PATIENCE = 300  # seconds after which a run hangs
GOODBYE = 30  # seconds that Ray's processes have for ending after the command has ended
ALONE = 120  # and after it was killed, when they have to find that out for themselves

# What other people's programs say when they fail: none of it is for the user of a training command.
FOREIGN = re.compile(r"Traceback \(most recent|^\s*File \"|^\s*@ +0x|\*\*\* SIG|\[\w+ E \d|^\(\w+ pid=|^\(raylet")


def lines(text: str) -> list[str]:
    """What stays on a terminal: without progress bars and empty lines."""
    parts = (part.strip() for part in re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)))
    return [part for part in parts if part and "%|" not in part]


def faults_of(said: list[str]) -> list[str]:
    """Why these last lines are not one line in the user's words; empty where they are."""
    last = said[-1] if said else ""
    why = []
    foreign = [line for line in said if FOREIGN.search(line)]
    if foreign:
        why.append(f"{len(said)} lines, among them: {foreign[0][:80]}")
    if not last:
        why.append("nothing is said")
    if len(last) > LONGEST_LINE:
        why.append(f"the line has {len(last)} characters")
    return why


def processes(folder: Path) -> Iterator[tuple[int, str]]:
    """(pid, command line) of all processes that were started for this folder."""
    mark = str(folder).encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes() and int(pid) != os.getpid():
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    yield int(pid), Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue


def left_behind(folder: Path, patience: float = GOODBYE) -> list[str]:
    """Who is still there when all have had time to end; they are ended here."""
    end = time.monotonic() + patience
    while (left := list(processes(folder))) and time.monotonic() < end:
        time.sleep(0.2)
    for pid, _ in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return [command.split("/")[-1][:60].strip() or str(pid) for pid, command in left]


def end_of(run: Run) -> int | None:
    """The exit code; None for a run that had to be killed."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        code = run.process.poll()
        if code is not None:
            return code
        time.sleep(0.02)
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()
    return None
