"""What is for the user goes to the terminal, and all there is to a file in the run's folder."""

import os
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from verl_omni.utils.masking import masked_argument

_terminal: TextIO | None = None


class Terminal:
    """Where progress and last words are shown. One that was closed ends no run."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Logged:
    """What is said to the user stands in the log too, among what the libraries say: it is all there, in order."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            os.write(2, text.encode(errors="replace"))
        except OSError:  # a disk without a free byte: the user still hears it
            pass
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def terminal() -> Terminal:
    return Terminal(_terminal or sys.stderr)


def open_run_log(folder: str | Path) -> None:
    """From here on stderr is `run.log`: that of Python, of the libraries below it, and what Ray brings from workers."""
    global _terminal
    Path(folder).mkdir(parents=True, exist_ok=True)
    log = os.open(Path(folder) / "run.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stderr.flush()
    _terminal = _terminal or os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(log, 2)
    os.close(log)
    if not isinstance(sys.stdout, Logged):
        sys.stdout = Logged(sys.stdout)
    command = shlex.join(map(masked_argument, sys.orig_argv))
    try:
        os.write(2, f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {command}\n".encode())
    except OSError as error:
        raise ValueError(f"{Path(folder) / 'run.log'} cannot be written: {error.strerror}") from error


def keep_daemons_quiet() -> None:
    """What workers print is shown; what Ray says of its own counts as stderr. To be called before ray.init."""
    from ray._private import worker

    show = worker.print_to_stdstream

    def show_workers(data: dict[str, Any], ignore_prefix: bool) -> None:
        show(data | {"is_err": data["is_err"] or data.get("pid") == "raylet"}, ignore_prefix)

    worker.print_to_stdstream = show_workers


def log_traceback(error: BaseException) -> None:
    try:
        traceback.print_exception(error, file=sys.stderr)
        sys.stderr.flush()
    except OSError:  # of the log's disk; the one line that is for the user goes elsewhere
        pass
