"""Many runs at once on one machine, each in a process of its own without Ray, all forked from one that has imported."""

import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")
GRACE = 45


@dataclass(frozen=True)
class Job:
    """`work(*given)` returns what is written as JSON to `file`; what it prints goes to a .log beside that."""

    file: Path
    work: Callable[..., dict[str, Any]]
    given: tuple[Any, ...]
    asked: float = 0.0  # how much of it, as the file of one that was made says


def import_everything() -> None:
    """Once, for all runs. No fork may find CUDA in use, or threads."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks the driver whether there is a GPU, and leaves it alone
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import verl_omni.testing.local_trainer  # noqa: F401
    from verl_omni.perf import flops

    flops.PEAKS.clear()  # FLOP rates are not shown, and each run would wait for them to be counted
    check_forks()


def check_forks() -> None:
    """After the imports, which may have begun to use CUDA: each fork would fail on its own."""
    import torch

    fork = FORK.Process(target=lambda: os._exit(torch.cuda._is_in_bad_fork()))  # to count GPUs is enough for that
    fork.start()
    fork.join()
    if fork.exitcode:
        sys.exit("error: some library began to use CUDA when it was imported, and no fork can use it now: remove it")


def run_all(jobs: list[Job], parallel: int, deadline: float = math.inf) -> list[Path]:
    """Those that are not there whole, so many at a time; one that fails leaves the others alone. Returns the failed.

    None is started after the `deadline`, a time of `time.monotonic`, which is the same in every process. Those that run
    then end by themselves; GRACE seconds later they are killed.
    """
    waiting = [job for job in jobs if not is_whole(job)]
    running: dict[Any, Job] = {}
    failed = []
    while waiting or running:
        if waiting and time.monotonic() > deadline:
            print(f"not started for want of time: {len(waiting)}", file=sys.stderr, flush=True)
            waiting.clear()
        while waiting and len(running) < parallel:
            job = waiting.pop(0)
            job.file.parent.mkdir(parents=True, exist_ok=True)
            process = FORK.Process(target=_work, args=(job,))
            process.start()
            running[process] = job
        time.sleep(0.2)
        if time.monotonic() > deadline + GRACE:
            for process in running:
                process.kill()
        for process in [process for process in running if not process.is_alive()]:
            job = running.pop(process)
            if process.exitcode:
                failed.append(job.file)
            print(f"{job.file.stem}: {'failed' if process.exitcode else 'done'}", file=sys.stderr, flush=True)
    return failed


def is_whole(job: Job) -> bool:
    """What a deadline has cut short says so of itself, and is made again; so is a run of which more is asked now."""
    if not job.file.exists():
        return False
    made = json.loads(job.file.read_text())
    return made.get("whole", True) and made.get("asked", job.asked) >= job.asked


def _work(job: Job) -> None:
    log = os.open(job.file.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    failed = False
    try:
        write(job.file, job.work(*job.given))
    except BaseException:
        traceback.print_exc()
        failed = True
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(failed))  # a trainer's threads would be waited for


def write(file: Path, told: dict[str, Any]) -> None:
    """Whole or not at all: a process may be killed at any time."""
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(told) + "\n")
    unfinished.replace(file)
