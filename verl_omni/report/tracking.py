"""Where a run's metrics go: a readable line on the console, one JSON line a step, and any backend that verl has."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_omni.report.tracker_notices import TrackerNotices
from verl_omni.report.tracker_pictures import TrackerPictures
from verl_omni.utils.errors import RunError
from verl_omni.utils.readable import readable
from verl_omni.utils.run_files import read_metrics
from verl_omni.utils.suggest import unknown

OWN = ("console", "jsonl")


# What a person watches during training, of the hundred or so numbers of a step: (metric, label, how it is shown).
WATCHED = (
    ("critic/rewards/mean", "reward", readable),
    ("critic/rewards/std_mean", "group std", readable),
    ("actor/implicit_accuracy", "chosen preferred", "{:.0%}".format),
    ("actor/implicit_margin", "margin", readable),
    ("actor/kl_loss", "kl", "{:.2e}".format),
    ("actor/pg_clipfrac", "clipped", "{:.1%}".format),
    ("actor/grad_norm", "grad norm", "{:.3g}".format),
    ("perf/time_per_step", "time", "{:.1f} s".format),
)
VALIDATION = "val-core/"


def known_backends() -> list[str]:
    """Every name that ``trainer.logger`` may hold."""
    from verl.utils.tracking import Tracking as VerlTracking

    return sorted({*OWN, *VerlTracking.supported_backend})


class Tracking:
    """Hands each step's metrics to all backends of ``trainer.logger``.

    ``resumed_step`` is the step of the checkpoint that the run goes on from, None for a run from the start. A run that
    ``only_adds``, as validation does, leaves all that other starts have logged.
    TensorBoard, W&B and MLflow write below ``run_dir`` unless ``TENSORBOARD_DIR``, ``WANDB_DIR`` or
    ``MLFLOW_TRACKING_URI`` say otherwise; W&B needs no network with ``WANDB_MODE=offline``.
    """

    def __init__(
        self,
        backends: str | Sequence[str],
        run_dir: str | Path,
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any] | None = None,
        resumed_step: int | None = None,
        total_steps: int | None = None,
        only_adds: bool = False,
    ):
        from verl.utils.tracking import Tracking as VerlTracking

        backends = [backends] if isinstance(backends, str) else list(backends)
        known = known_backends()
        for name in backends:
            if name not in known:
                raise ValueError(unknown("trainer.logger", name, known))

        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        theirs = [name for name in backends if name not in OWN]
        given = dict(os.environ)
        with _default_env(
            TENSORBOARD_DIR=run_dir / "tensorboard",
            WANDB_DIR=run_dir,
            MLFLOW_TRACKING_URI=f"sqlite:///{(run_dir / 'mlflow.db').resolve()}",
        ):
            if "mlflow" in theirs and "MLFLOW_TRACKING_URI" not in given:
                _keep_artifacts_in(run_dir / "mlflow", project_name)
            self._theirs = VerlTracking(project_name, experiment_name, theirs, dict(config or {}))
        if "mlflow" in theirs and "mlflow" not in self._theirs.logger:  # verl would go on without it
            raise RunError("trainer.logger has mlflow, which could not be started: run.log has its own words")
        self._pictures = TrackerPictures(run_dir, self._theirs.logger)
        self._notices = TrackerNotices(run_dir, self._theirs.logger)
        self._own = []
        if "jsonl" in backends:
            path = run_dir / "metrics.jsonl"
            self._own.append(AddedLines(path) if only_adds else JsonLines(path, resumed_step))
        if "console" in backends:
            self._own.append(Console(total_steps))

    def log(self, data: Mapping[str, Any], step: int) -> None:
        numbers = {key: _number(value) for key, value in data.items()}
        for backend in self._own:
            backend.log(numbers, step)
        self._theirs.log(numbers, step)
        self._pictures.send(step)
        self._notices.send()

    def finish(self, exit_code: int = 0) -> None:
        self._notices.send()  # of what was said after the last line
        for backend in self._own:
            backend.finish()
        self._theirs.finish(exit_code)


class Console:
    """``step 12/100 | reward 0.734 | kl 1.20e-03 | time 4.2 s``, above a progress bar if there is one."""

    def __init__(self, total_steps: int | None = None):
        self.total_steps = total_steps

    def log(self, data: Mapping[str, Any], step: int) -> None:
        from tqdm import tqdm

        if any(key.startswith(VALIDATION) or key in (name for name, _, _ in WATCHED) for key in data):
            try:
                tqdm.write(self.line(data, step))
            except OSError:  # the terminal was closed: the run goes on, and has something to save
                pass

    def line(self, data: Mapping[str, Any], step: int) -> str:
        parts = [f"step {step}" + (f"/{self.total_steps}" if self.total_steps else "")]
        scores = [key for key in data if key.startswith(VALIDATION)]
        parts += [f"val {key.removeprefix(VALIDATION)} {readable(data[key])}" for key in scores]
        failed = [key for key in data if key.startswith("val-aux/") and key.endswith("/failed")]
        parts += [f"val {key.split('/')[1]} {data[key]:.0f} scores failed" for key in failed]
        parts += [f"{label} {shown(data[key])}" for key, label, shown in WATCHED if key in data]
        return " | ".join(parts)

    def finish(self) -> None:
        pass


class JsonLines:
    """``{"step": 3, "data": {...}}``, one line a step in ascending order, on disk as soon as it is logged.

    A resumed run first cuts off what lies beyond its checkpoint (and a last line that was never finished), so that the
    file reads as if there had been no interruption. A run from the start keeps an older file as ``*.old.jsonl``. NaN
    and infinity, which JSON does not have, become null.
    """

    def __init__(self, path: Path, resumed_step: int | None = None):
        self.path = path
        kept = []
        if path.exists() and resumed_step is not None:
            kept = [entry for entry in read_metrics(path) if entry["step"] <= resumed_step]
        elif path.exists():
            path.replace(path.with_suffix(".old.jsonl"))
        new = path.with_suffix(".tmp")
        new.write_bytes(b"".join(_line(entry) for entry in kept))
        new.replace(path)
        self._last = kept[-1] if kept else None
        self._file = path.open("r+b")
        self._end = self._file.seek(0, os.SEEK_END)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        entry = {"step": int(step), "data": {key: _finite(value) for key, value in data.items()}}
        if self._last and step < self._last["step"]:
            raise ValueError(f"{self.path}: step {step} logged after step {self._last['step']}")
        if self._last and step == self._last["step"]:  # more about the same step, such as a validation after resuming
            entry["data"] = self._last["data"] | entry["data"]
            self._end -= len(_line(self._last))
        self._file.seek(self._end)
        self._file.write(_line(entry))
        self._end = self._file.truncate(self._file.tell())
        self._file.flush()
        self._last = entry

    def finish(self) -> None:
        self._file.close()


class AddedLines(JsonLines):
    """What a later look at one of a run's checkpoints measured, added to the line of its step; no line is lost."""

    def __init__(self, path: Path):
        self.path = path

    def log(self, data: Mapping[str, Any], step: int) -> None:
        entries = {entry["step"]: entry["data"] for entry in (read_metrics(self.path) if self.path.exists() else [])}
        entries[int(step)] = entries.get(step, {}) | {key: _finite(value) for key, value in data.items()}
        new = self.path.with_suffix(".tmp")
        new.write_bytes(b"".join(_line({"step": s, "data": entries[s]}) for s in sorted(entries)))
        new.replace(self.path)

    def finish(self) -> None:
        pass


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _number(value: Any) -> Any:
    """A plain Python number for a 0-d tensor or a NumPy scalar."""
    return value.item() if hasattr(value, "item") else value


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep_artifacts_in(folder: Path, project_name: str) -> None:
    """MLflow's own place for images is the folder that a run was started in."""
    import mlflow

    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    if client.get_experiment_by_name(project_name) is None:
        client.create_experiment(project_name, artifact_location=folder.resolve().as_uri())


@contextmanager
def _default_env(**values: str | Path) -> Iterator[None]:
    """Set environment variables for the while, except those that the user has set."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: str(values[name]) for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
