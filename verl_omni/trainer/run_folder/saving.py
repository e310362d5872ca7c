"""When to save: at the steps that were asked for, in between by the clock, and when the run ends early."""

import math
import time
from collections.abc import Mapping
from pathlib import Path

from verl_omni.config.schema import TrainerConfig
from verl_omni.trainer.interrupts import stop_requested
from verl_omni.trainer.run_folder import checkpointing


def is_due(step: int, every: int, last: bool) -> bool:
    """-1: only after the last step. 0: never. N: every N steps and after the last."""
    return every != 0 and (last or (every > 0 and step % every == 0))


class Saving:
    """Says whether a checkpoint is due. One that no `save_freq` asks for is replaced by the next."""

    def __init__(self, trainer: TrainerConfig):
        self.every, self.minutes = trainer.save_freq, trainer.save_minutes
        self._keeps_best = trainer.keep_best
        self._last, self._step = time.monotonic(), 0
        self._best: tuple[int, float] | None = None  # a step that may not be on the disk yet, and its score

    def is_due(self, step: int, last: bool) -> bool:
        wanted = stop_requested() or self._clock_is_up() or self.best_score(step) is not None
        return self.is_asked_for(step, last) or (self.every != 0 and wanted)

    def see(self, step: int, metrics: Mapping[str, float], folder: Path) -> dict[str, float]:
        """A validation of this step. With `keep_best`: what is the best up to now, for the metrics."""
        score, held = validation_score(metrics), self._best or (None, -math.inf)
        if not self._keeps_best or score is None:
            return {}
        best, most = max(checkpointing.read_best(folder), held, key=lambda found: found[1])
        if score > most and step:
            self._best, best, most = (step, score), step, score
        return {} if best is None else {"training/best_step": float(best), "training/best_score": most}

    def best_score(self, step: int) -> float | None:
        """That of this step, where no other is as good."""
        return self._best[1] if self._best is not None and self._best[0] == step else None

    def is_asked_for(self, step: int, last: bool) -> bool:
        return is_due(step, self.every, last)

    def begins(self, step: int) -> None:
        """A checkpoint of this step is there, or is being tried: nobody tries again."""
        self._last, self._step = time.monotonic(), step

    def misses(self, step: int) -> bool:
        """Whether a run that ends after this step would lose it."""
        return self.every != 0 and step != self._step

    def _clock_is_up(self) -> bool:
        return self.minutes > 0 and time.monotonic() - self._last >= 60 * self.minutes

    def mark(self, folder: Path) -> None:
        """Into a checkpoint that is being written: it is not one of those that the user asked for."""
        note = "saved by trainer.save_minutes or keep_best, on a signal or after a failure; the next one replaces it\n"
        (folder / checkpointing.IN_BETWEEN).write_text(note)

    def saved(self, folder: Path, step: int) -> None:
        """A whole checkpoint is there: older ones in between are not needed any more, but for the best."""
        self._last = time.monotonic()
        best = checkpointing.best_step(folder)
        for number, path in checkpointing.whole_checkpoints(folder).items():
            if number < step and number != best and (path / checkpointing.IN_BETWEEN).exists():
                checkpointing.remove(path)


def validation_score(metrics: Mapping[str, float]) -> float | None:
    """The mean over data sources of their validation scores; None where nothing was validated."""
    scores = [value for name, value in metrics.items() if name.startswith("val-core/")]
    return sum(scores) / len(scores) if scores else None
