"""The command itself: a small process that starts the run, watches it, and ends everything that it started.

Ray, torch and a user's code can hang, crash or be killed in ways that leave them no last word, and Ray's daemons can
outlive a driver that is stopped while it starts them. This process imports none of that. It knows from the run's
reports where it is, so that a signal can wait for the end of a step, and the death of the driver is one line.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time

from verl_omni.trainer import progress as reports
from verl_omni.trainer.progress import Progress

RAISES = "HYDRA_FULL_ERROR"  # with this set to 1, Hydra raises what it would print
TRACEBACKS = bool(os.environ.get(RAISES))  # the user has set it: all tracebacks are shown
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_TO_END = 60.0  # for Ray to shut down, once the run is over
SAME_REQUEST = 0.3  # `timeout`, batch systems and a launcher hand one request on twice; a person is slower
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def open_streams() -> None:
    """Of a command that was started with closed ones: the next files that are opened would take their numbers."""
    for number, (stream, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, stream) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)  # which is what `open` has given already
            os.set_inheritable(number, True)
            setattr(sys, stream, os.fdopen(number, mode))


def watch() -> None:
    """Go on in a new process, which this one watches to its end: the call returns in the new one only."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent becomes our child, and can be ended
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until it is clear who hears them
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        os.close(reader)
        os.setsid()  # a Ctrl-C is for the watching process alone
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        reports.report_to(writer)
        return
    os.close(writer)
    code = Supervisor(child, reader).wait()
    sys.stdout.flush()
    os._exit(code)


class Supervisor:
    """Waits for a run. The first signal lets it finish its step and save, if it has anything to lose."""

    def __init__(self, child: int, reader: int):
        self.child, self.reader = child, reader
        self.progress = Progress()
        self.stopped_by: int | None = None
        self._asked_at = 0.0
        self._unread = b""
        self._wakeup, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def wait(self) -> int:
        """The exit code, once nothing of the run is left."""
        over_since = None
        while True:
            ready, _, _ = select.select([self.reader, self._wakeup], [], [], 1.0)
            if self.reader in ready and not self._read():
                break  # every process that could report has ended
            if self._wakeup in ready:
                for number in os.read(self._wakeup, 100):
                    if number in STOPS and self._stop(number):
                        return self._stopped_at_once()
            over_since = None if self.progress.over is None else over_since or time.monotonic()
            if over_since is not None and time.monotonic() - over_since > SECONDS_TO_END:
                break
            if os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                while select.select([self.reader], [], [], 0)[0] and self._read():
                    pass
                break
        return self._ended()

    def _read(self) -> bool:
        data = os.read(self.reader, 65536)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self.progress = Progress(**json.loads(line))
        return bool(data)

    def _stop(self, number: int) -> bool:
        """True where the run is to end at once: there is nothing to save, or the user insists."""
        if self.stopped_by is not None and time.monotonic() - self._asked_at < SAME_REQUEST:
            return False
        again, self.stopped_by, self._asked_at = self.stopped_by is not None, number, time.monotonic()
        if again or not self.progress.done or self.progress.over is not None:
            return True
        saved = "and saved" if self.progress.saves else "but not saved, as trainer.save_freq=0"
        say(f"stopping: this step will be finished {saved} (once more to stop at once)")
        os.kill(self.child, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        return False

    def _stopped_at_once(self) -> int:
        end_children()
        if self.progress.over is not None:
            return self._said()
        return self._last_words(f"stopped by {name(self.stopped_by)}", 128 + self.stopped_by)

    def _ended(self) -> int:
        end, deadline = None, time.monotonic() + 5
        while end is None and time.monotonic() < deadline:
            end = os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            time.sleep(0.01)
        end_children()
        if end is None and self.progress.over is not None:
            return self._said()
        exited = end is not None and end.si_code == os.CLD_EXITED
        # Ray's own code ends a process that has lost its cluster: then nobody has said why.
        under_way = self.progress.over is None and self.progress.run_dir is not None and self.stopped_by is None
        silent = exited and end.si_status and under_way
        if exited and not silent:
            return end.si_status
        why = "ended" if end is None else f"was killed by {name(end.si_status)}"
        if silent:
            why = f"ended with exit code {end.si_status} and without a word"
        return self._last_words(f"error: the driver (pid {self.child}) {why}", 1)

    def _last_words(self, line: str, code: int) -> int:
        """Of a run that could not say them itself, nor write its report."""
        line = f"{line} during the {self.progress.where()}"
        if self.progress.run_dir is not None:
            self.progress.report = self.progress.report or late_report(self.progress.run_dir)
            self.progress.over, self.progress.words = code, line
            reports.write_progress(self.progress, None)
        say(f"{line}{last_words(self.progress)}")
        return code

    def _said(self) -> int:
        """A run that was over and did not end: what it would have said, and its exit code."""
        if self.progress.last:
            say(f"{self.progress.last}{last_words(self.progress)}")
        return self.progress.over


def late_report(run_dir: str) -> str | None:
    """The report of a run that has ended; none where it has nothing to show."""
    from verl_omni.report.report import write_report

    metrics = os.path.join(run_dir, "metrics.jsonl")
    if not os.path.isfile(metrics) or not os.path.getsize(metrics):
        return None
    try:
        return str(write_report(run_dir))
    except (OSError, ValueError) as error:
        say(f"the report could not be written: {error}")
        return None


def last_words(progress: Progress) -> str:
    """What is saved, how to go on, where to read more: the end of the one line that a user sees."""
    from verl_omni.trainer.run_folder.checkpointing import whole_checkpoints

    if progress.run_dir is None:
        return ""
    saved = list(whole_checkpoints(progress.run_dir).values())
    if not saved:
        going_on = "nothing was saved yet" if progress.saves else "nothing was saved, as trainer.save_freq=0"
    elif progress.resume_mode.startswith("auto"):
        going_on = f"the same command goes on from {saved[-1]}"
    else:
        going_on = f"the same command with trainer.resume_mode=auto goes on from {saved[-1]}"
    report = f"; report in {progress.report}" if progress.report else ""
    return f"; {going_on}{report}; details in {os.path.join(progress.run_dir, 'run.log')}"


def name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def say(line: str) -> None:
    try:
        # A progress bar may stand in the line: back to its start, and clear it.
        print(f"\r\x1b[K{line}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)
    except OSError:  # the terminal was closed: there is nobody to tell
        pass


def end_children() -> None:
    """Kill all that the run has started, until there is nothing left."""
    import psutil

    me, deadline = psutil.Process(), time.monotonic() + 30
    while time.monotonic() < deadline:
        left = me.children(recursive=True)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
