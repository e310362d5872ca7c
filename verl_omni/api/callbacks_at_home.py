"""Callbacks of a run that was started from Python: objects of that process, which its driver calls over there.

`AtHome` is in the run's `trainer.callbacks` and tells of every event; `Told` hears of them in the process that has the
objects, and answers what they want: numbers for the metrics, a stop.
"""

import functools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.api.home import call_home, known
from verl_omni.trainer.callbacks import SETTING, Callback, Run, Step, check_methods
from verl_omni.utils.errors import RunError

if TYPE_CHECKING:
    from verl.protocol import DataProto

CALLBACKS = "callbacks"
AT_HOME = f"{__name__}.AtHome"


# In the run's driver.


class AtHome(Callback):
    def on_run_start(self, run: Run) -> None:
        fixed = {"config": run.config, "folder": run.folder, "total_steps": run.total_steps}
        self._tell("on_run_start", run, fixed=fixed)

    def on_step_end(self, run: Run, step: Step) -> None:
        rows = pickle.dumps(step.batch)  # read there only if somebody looks at it
        told = {"number": step.number, "metrics": step.metrics, "timing": dict(step.timing), "last": step.last}
        answer = self._tell("on_step_end", run, step=told | {"rows": rows})
        step.metrics |= answer["metrics"]

    def on_validation(self, run: Run, metrics: dict[str, float]) -> None:
        self._tell("on_validation", run, metrics=metrics)

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        self._tell("on_checkpoint", run, folder=folder)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self._tell("on_run_end", run, error=None if error is None else (type(error).__name__, str(error)))

    def _tell(self, event: str, run: Run, **told: Any) -> dict[str, Any]:
        answer = call_home(CALLBACKS, {"event": event, "step_behind": run.step, **told})
        if answer["failed"]:
            raise RunError(f"{SETTING}: {answer['failed']}")
        if answer["stop"]:
            run.stop()
        return answer


# Where the objects are.


class RunAtHome(Run):
    """`stop` is heard by the driver when it is answered."""

    wants_to_stop = False

    def stop(self) -> None:
        self.wants_to_stop = True

    @property
    def stopping(self) -> bool:
        return self.wants_to_stop


class StepAtHome(Step):
    def __init__(self, rows: bytes, **told: Any):
        vars(self).update(told)
        self._rows = rows

    @functools.cached_property
    def batch(self) -> "DataProto":
        return pickle.loads(self._rows)  # from the run's driver, which knew the key


class Told:
    """Called for every event: has all objects hear of it, in their order."""

    def __init__(self, callbacks: Sequence[Callback]):
        for one in callbacks:
            if not isinstance(one, Callback):
                raise ValueError(f"callbacks: {one!r} is no object of a subclass of verl_omni.Callback")
            check_methods(type(one).__name__, type(one))
        self.callbacks = callbacks
        self.run: RunAtHome | None = None

    def __call__(self, event: str, step_behind: int, **told: Any) -> dict[str, Any]:
        if fixed := told.pop("fixed", None):
            self.run = RunAtHome(**fixed)
        self.run.step = step_behind
        if event == "on_step_end":
            told["step"] = StepAtHome(**told["step"])
        elif event == "on_run_end":
            told["error"] = None if told["error"] is None else known(told["error"][0])(told["error"][1])
        failed = None
        for one in self.callbacks:
            try:
                getattr(one, event)(self.run, *told.values())
            except (Exception, SystemExit) as error:
                failed = failed or f"{type(one).__name__} failed in {event}: {type(error).__name__}: {error}"
                if event != "on_run_end":  # of which all are told
                    break
        metrics = told["step"].metrics if "step" in told else {}
        return {"failed": failed, "stop": self.run.stopping, "metrics": metrics}
