"""The checkpoints of one run: written from its workers, and the one that it goes on from read into them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_omni.data.prompt_loader import PromptDataLoader
from verl_omni.trainer.run_folder import checkpointing, record
from verl_omni.trainer.run_folder.checkpointing import Unpublished
from verl_omni.trainer.run_folder.resuming import Start, plan_start
from verl_omni.trainer.run_folder.saving import Saving


@dataclass
class WholeStep:
    """The last step that was learned to its end: what a checkpoint needs beside the weights of that moment."""

    step: int
    data: dict[str, Any]  # where in the data a run goes on from there
    changes: list[int] | None  # how often each rank has changed its weights by then
    validation_due: bool = False


class Checkpoints:
    def __init__(self, config: DictConfig, folder: Path, give_up: Callable[[], Any]):
        """Before anything is filled into the configuration: it is remembered as a later start will see it.

        After `give_up` no rank writes any more.
        """
        self.config, self.folder, self._give_up = config, folder, give_up
        self.record = record.describe(config)
        self.saving = Saving(config.trainer)
        self.whole: WholeStep | None = None
        self.unpublished: Unpublished | None = None
        self.trained_groups: dict[str, Any] | None = None  # of steps that are not trained as a whole

    def validated(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The last whole step was; what `trainer.keep_best` tells of it."""
        return self.saving.see(self.whole.step, metrics, self.folder)

    def save(self, workers: Any, last: bool = False) -> list[Path]:
        """The last whole step. Checkpoints that are whole by now: it, unless it is written while training goes on."""
        done = self.finish(workers)
        whole = self.whole
        self.saving.begins(whole.step)
        checkpointing.check_room(self.folder, workers.checkpoint_bytes()[0])
        keep = self.config.trainer.max_ckpt_to_keep
        unpublished = Unpublished(self.folder, whole.step, self.record, keep, self.saving.best_score(whole.step))
        with unpublished.writing() as folder, self._by_all_or_none():
            workers.save_checkpoint(str(folder), whole.step)
            checkpointing.write_data_state(folder, whole.data, whole.validation_due)
            if not self.saving.is_asked_for(whole.step, last):
                self.saving.mark(folder)
        self.unpublished = unpublished
        return done + self.advance(workers, wait=last or not self.config.actor_rollout_ref.actor.checkpoint.async_save)

    def advance(self, workers: Any, wait: bool = False) -> list[Path]:
        """The checkpoint that is being written, if all ranks are through with it."""
        unpublished = self.unpublished
        if unpublished is None:
            return []
        self.unpublished = None
        with unpublished.writing(), self._by_all_or_none():
            written = all(workers.checkpoint_written(wait))
        if not written:
            self.unpublished = unpublished
            return []
        with unpublished.writing() as place:
            checkpointing.check_all_seen(place, workers.checkpoint_files(str(place)))
        found = unpublished.publish()
        self.saving.saved(self.folder, unpublished.step)
        return [found]

    @contextmanager
    def _by_all_or_none(self) -> Iterator[None]:
        """One rank's error is told before the others are through: nothing is deleted that they still write."""
        try:
            yield
        except Exception:
            self._give_up()
            raise

    def finish(self, workers: Any) -> list[Path]:
        """Wait for it."""
        return self.advance(workers, wait=True)

    def load(self, workers: Any, total_steps: int, loader: PromptDataLoader | None) -> Start:
        """Go on from the checkpoint that `trainer.resume_mode` names, if there is one."""
        start = plan_start(self.config, total_steps, self.record)
        if start.source is None:
            return start
        workers.load_checkpoint(str(start.source))
        self.saving.begins(start.step)  # it is there
        if loader is None:
            print(f"Validating {start.source}.", flush=True)
            return start
        state = checkpointing.data_state(start.source)
        other = loader.order_changes(state)
        if other and self.config.trainer.resume_changes == "allow":
            print(f"The prompts start at the beginning of a new order: {'; '.join(other)}.", flush=True)
        else:
            loader.load_state_dict(state)
            self.trained_groups = state.get("groups")
        print(f"Resuming from {start.source}: step {start.step} of {total_steps} is done.", flush=True)
        return start
