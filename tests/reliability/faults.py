"""What a fault is, how one is tried, and when nothing was lost."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from e2e_runs import LEARNING, metrics, settings
from safetensors.torch import load_file
from watch import ALONE, GOODBYE, Run, end_of, faults_of, left_behind, lines, processes

MOMENTS = Path(__file__).with_name("moments.py")
WEIGHTS = "global_step_3/export/pytorch_lora_weights.safetensors"
SECONDS = 90  # from the fault to the end of the command
LINES = 4  # after the fault, at most: what happened, and what may be said on the way out
_building = threading.RLock()

# Something of everything, with our own module in all processes.
COMMON = [setting.replace("killer", "moments") for setting in LEARNING] + ["trainer.max_ckpt_to_keep=null"]


@dataclass(frozen=True)
class Fault:
    """`order` is for moments.py. Or `outside` acts on the running command (and may return another command that is to be
    judged in its place). Or `given` prepares a run's folder.

    `says` are words of the line, None where nobody can say any (kill -9 of the command) or none is due. `ends` is how
    the command ends: "fails" or "succeeds". `again` are settings for going on where the same command does not.
    """

    theme: str
    name: str
    order: dict[str, Any] | None = None
    outside: Callable[[Run, Path], "Run | None"] | None = None
    given: Callable[[Path], None] | None = None
    arguments: tuple[str, ...] = ()
    env: dict[str, str | None] = field(default_factory=dict)
    says: tuple[str, ...] | None = ()
    ends: str = "fails"
    again: tuple[str, ...] = ()
    repeats: bool = False  # whether more than one step may have to be done again
    clean: bool = True  # whether "the rest" of the output has to be in order; not where nobody of ours is left to write
    disk: int | None = None  # bytes of a disk of its own for the run's folder
    limit: float = SECONDS

    kind = "fault"

    def environment(self, folder: Path) -> dict[str, str | None]:
        """With `{f}` as the case's folder; a folder that TMPDIR names is made."""
        env = {k: v and v.replace("{f}", str(folder)) for k, v in self.env.items()}
        if env.get("TMPDIR"):
            Path(env["TMPDIR"]).mkdir()
        return env


def attempt(case: Fault, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    with disk(case, folder) as skipped:
        if skipped:
            return {"skipped": skipped}
        return _attempt(case, folder)


def _attempt(case: Fault, folder: Path) -> dict[str, Any]:
    ready(folder)
    if case.given:
        case.given(folder)
    if case.order:
        (folder / "order.json").write_text(json.dumps(case.order))
    start = time.time()
    run = Run(command(*case.arguments), folder, **case.environment(folder))
    (folder / "driver").write_text(str(run.process.pid))
    other = case.outside(run, folder) if case.outside else None
    code, why = end_of(run), []
    ended = time.time()
    left = left_behind(folder, ALONE if code == -signal.SIGKILL else GOODBYE)
    text = run.output()
    happened = json.loads((folder / "happened").read_text()) if (folder / "happened").exists() else {}
    if (case.order or case.outside) and not happened:
        why.append("the moment never came")
    seconds = ended - happened.get("time", start)
    after = lines(text.encode()[happened.get("log", 0) :].decode(errors="replace"))
    if other is not None:
        after, seconds = lines(other.output()), other.seconds
        if other.process.returncode in (0, None):
            why.append("the second is accepted")
    line = after[-1] if after else ""
    if case.says is None:
        line = ""
        why += [part for part in faults_of(after or ["."]) if case.clean]
    else:
        why += faults_of(after)
        why += [f'does not say "{word}"' for word in case.says if word not in line]
        if len(after) > LINES and case.ends == "fails":
            why.append(f"{len(after)} lines after the fault")
    if code is None:
        why.append("hangs")
    elif (code == 0) != (case.ends == "succeeds"):
        why.append(f"exit code {code}")
    if seconds > case.limit and case.ends == "fails":
        why.append(f"takes more than {case.limit:.0f} s")
    if left:
        why.append(f"leaves {len(left)} processes behind: {left[0]}")
    shown = code if other is None else other.process.returncode
    result = {"seconds": seconds, "code": shown, "line": line, "lines": len(after), "why": why}
    return result | going_on(case, folder, happened.get("step", last_step(folder / "run")), why)


def going_on(case: Fault, folder: Path, logged: int, why: list[str]) -> dict[str, Any]:
    """Type the command again: do metrics and weights come out as if nothing had happened?"""
    run_dir = folder / "run"
    order = case.order or {}
    saving = order.get("at") == "save" or order.get("do") == "fill"  # then the save of the last step was in flight
    begun = logged + (not saving)
    (folder / "log.txt").rename(folder / "first.txt")
    for name in ("order.json", "happened"):
        (folder / name).unlink(missing_ok=True)
    (run_dir / "ballast").unlink(missing_ok=True)
    again = {}
    if case.ends == "fails":
        run = Run(command(*case.again), folder)
        (folder / "driver").write_text(str(run.process.pid))
        code = end_of(run)
        said = lines(run.output())
        left = left_behind(folder)
        resumed = [line for line in said if line.startswith("Resuming")]
        done = int(resumed[0].split(": step ")[1].split()[0]) if resumed else 0
        repeated = list(range(done + 1, min(begun, 3) + 1)) if begun > 0 else []
        again = {"resumed": resumed[0] if resumed else "from the start", "repeated": repeated}
        if code != 0:
            why.append(f"going on ends with {code}: {said[-1][:200] if said else 'nothing said'}")
        if left:
            why.append("going on leaves processes behind")
        if len(repeated) > 1 and not (case.again or case.repeats):
            why.append(f"steps {repeated} had to be done again")
    same = equal(run_dir)
    if same:
        why.append(same)
    return again | {"same": not same}


def equal(run_dir: Path) -> str:
    """What differs from the uninterrupted run; empty where nothing does."""
    try:
        expected, got = metrics(whole()), metrics(run_dir)
        for step in expected:
            if expected[step] != got.get(step):
                return f"the metrics of step {step} differ"
        one, other = load_file(whole() / WEIGHTS), load_file(run_dir / WEIGHTS)
    except (OSError, AssertionError, ValueError) as error:
        return f"the result cannot be read: {error}"
    same = one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    return "" if same else "the weights differ"


def last_step(run_dir: Path) -> int:
    steps = [-1]
    with contextlib.suppress(OSError):
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                steps.append(json.loads(line)["step"])
    return max(steps)


def command(*more: str) -> list[str]:
    return settings("run", *COMMON, *more)


def ready(folder: Path) -> None:
    shutil.copy(MOMENTS, folder / "moments.py")


# ---- runs that the cases share, made when the first of them asks ------------------------------------------


def whole() -> Path:
    """The folder of a run that nothing happened to."""
    with _building:
        return _whole()


@functools.cache
def _whole() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="whole-"))
    ready(folder)
    Run(command(), folder).succeed()
    return folder / "run"


def interrupted() -> Path:
    """The folder of a run that was killed in its third step: checkpoints of steps 1 and 2 are there."""
    with _building:
        return _interrupted()


@functools.cache
def _interrupted() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="interrupted-"))
    ready(folder)
    order = {"at": "rewards", "after": 2, "do": "signal", "who": "command", "number": signal.SIGKILL}
    (folder / "order.json").write_text(json.dumps(order))
    run = Run(command(), folder)
    (folder / "driver").write_text(str(run.process.pid))
    assert end_of(run) == -signal.SIGKILL, run.output()[-3000:]
    left_behind(folder)
    return folder / "run"


# ---- acting from outside ---------------------------------------------------------------------------------


def signal_when(number: int, ready_: Callable[[Path], bool], group: bool = False) -> Callable[[Run, Path], None]:
    """Send a signal to the command (or to all of its terminal's foreground) as soon as something can be seen."""

    def act(run: Run, folder: Path) -> None:
        end = time.monotonic() + 120
        while not ready_(folder):
            if run.process.poll() is not None or time.monotonic() > end:
                return
            time.sleep(0.05)
        note(folder)
        (os.killpg if group else os.kill)(run.process.pid, number)

    return act


def kill_when(title: str) -> Callable[[Run, Path], None]:
    """Kill the first process with that word in its command line as soon as there is one."""

    def act(run: Run, folder: Path) -> None:
        end = time.monotonic() + 120
        while not (found := [pid for pid, line in processes(folder) if title in line]):
            if run.process.poll() is not None or time.monotonic() > end:
                return
            time.sleep(0.02)
        note(folder)
        os.kill(found[0], signal.SIGKILL)

    return act


def note(folder: Path) -> None:
    """The fault happens now."""
    size = (folder / "log.txt").stat().st_size
    now = {"time": time.time(), "log": size, "step": last_step(folder / "run")}
    (folder / "happened").write_text(json.dumps(now))


def after_seconds(seconds: float) -> Callable[[Path], bool]:
    started: dict[Path, float] = {}
    return lambda folder: time.monotonic() - started.setdefault(folder, time.monotonic()) > seconds


def is_running(title: str) -> Callable[[Path], bool]:
    return lambda folder: any(title in line for _, line in processes(folder))


@contextlib.contextmanager
def disk(case: Fault, folder: Path) -> Iterator[str | None]:
    """A small disk for the run's folder; yields why the case cannot be tried here, or None."""
    if case.disk is None:
        yield None
        return
    (folder / "run").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={case.disk}", "none", str(folder / "run")]
    try:
        made = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError as error:
        yield f"no small disk here: {error}"
        return
    if made.returncode:
        yield f"no small disk here: {made.stderr.strip()}"
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", "-l", str(folder / "run")], check=True)
