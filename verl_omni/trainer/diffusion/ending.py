"""The end of a run, whatever its reason: what is whole is saved, the report is written, and a line says where."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from verl_omni.report.report import write_report
from verl_omni.trainer.callbacks import Run, UsersCallbacks
from verl_omni.trainer.failures import what_failed
from verl_omni.trainer.progress import tell
from verl_omni.trainer.run_folder import checkpointing
from verl_omni.trainer.run_folder.checkpoints import Checkpoints
from verl_omni.trainer.run_folder.log import log_traceback
from verl_omni.utils.errors import RunError

SECONDS_TO_ANSWER = 60.0  # a rank that waits for another, which has failed, never does
SECONDS_TO_END_DRAWING = 300.0  # of a batch that is being drawn


def save_what_is_whole(
    checkpoints: Checkpoints,
    changes: Callable[[], list[int] | None],
    save: Callable[[], None],
    finish: Callable[[], None],
) -> None:
    """After a failure: the last whole step, if it is not saved yet and no later step has touched the weights.

    What is being written is waited for, where all ranks are there.
    """
    whole = checkpoints.whole
    if whole is None:
        return
    try:
        if checkpoints.unpublished is not None and changes() is not None:
            finish()
        if checkpoints.saving.misses(whole.step) and whole.changes is not None and changes() == whole.changes:
            save()
    except Exception as error:  # the one that ends the run is told; this one beside it
        log_traceback(error)
        print(f"step {whole.step} could not be saved: {what_failed(error)}", flush=True)


def end_drawing(workers: Any) -> None:
    """Until every rank has ended it, or an error."""
    if answers(workers, "stop_rollout", SECONDS_TO_END_DRAWING) is None:
        raise RunError("a rank is still drawing, and waits for another or does not answer")


def answers(workers: Any, method: str, seconds: float | None = None) -> list[Any] | None:
    """What each rank answers; None where one is dead or does not answer."""
    asked = workers.execute_all_async(method)
    deadline, waiting = time.monotonic() + (seconds or SECONDS_TO_ANSWER), list(asked)
    try:
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                return None
            ray.get(done)
    except RayActorError:
        return None
    return ray.get(asked)


def report(run: Run) -> Path | None:
    """Written anew, wherever there is anything to show. A run does not fail for it."""
    metrics = run.folder / "metrics.jsonl"
    if "jsonl" not in run.config.trainer.logger or not metrics.exists() or not metrics.stat().st_size:
        return None
    try:
        path = write_report(run.folder)
    except Exception as error:
        log_traceback(error)
        print(f"the report could not be written: {what_failed(error)}", flush=True)
        return None
    tell(report=str(path))
    return path


def tell_callbacks(callbacks: UsersCallbacks, run: Run, error: BaseException) -> None:
    """That the run has failed. The error that ends it is told; one of theirs beside it."""
    try:
        callbacks.on_run_end(run, error)
    except RunError as another:
        log_traceback(another)
        print(another, flush=True)


def where_things_are(run_dir: Path, step: int, report: Path | None) -> str:
    """One line for the end of a run: its weights, its report and its folder."""
    found, checkpoint = [], checkpointing.whole_checkpoints(run_dir).get(step)
    if checkpoint is not None:  # none with trainer.save_freq=0
        export = checkpoint / "export"
        found.append(f"weights in {export}" if export.is_dir() else f"checkpoint in {checkpoint}, no export")
    best, score = checkpointing.read_best(run_dir)
    if best is not None and best != step:
        found.append(f"the best validation ({score:.4g}) was that of global_step_{best}")
    if report is not None:
        found.append(f"report in {report}")
    return ", ".join([f"Done: all of the run is in {run_dir}", *found])
