"""Before any worker starts: which checkpoint a run goes on from, and whether it is the same run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_omni.trainer.run_folder import checkpointing, manifest
from verl_omni.trainer.run_folder import record as run_record
from verl_omni.trainer.run_folder.record import ARR


@dataclass
class Start:
    source: Path | None = None  # None: from nothing
    step: int = 0
    changed: bool = False
    finished: bool = False
    validation_due: bool = False  # of that step, which ended without it
    notices: list[str] = field(default_factory=list)  # lines for the user


def plan_start(config: DictConfig, total_steps: int, record: dict[str, Any] | None = None) -> Start:
    """Where this run starts from; raises one line where it cannot or would not be the run that it says it is."""
    trainer = config.trainer
    source, notices = checkpointing.find_resume(
        trainer.default_local_dir, trainer.resume_mode, trainer.resume_from_path
    )
    if source is None:
        return Start(notices=notices)
    made = manifest.read(source)
    start = Start(source, made["global_step"], notices=notices)
    may, may_not = run_record.changes(made["run"], record or run_record.describe(config))
    if trainer.val_only:  # trains nothing: only the model has to be the same
        may, may_not = {}, {name: said for name, said in may_not.items() if name.startswith(f"{ARR}model.")}
    _check_changes(config, source, may_not)
    start.changed = bool(may or may_not)
    if start.changed:
        notices.append(f"Changed since {source}: {'; '.join((may | may_not).values())}.")
    if not trainer.val_only:
        _check_groups(config, source, start.step)
        if total_steps < start.step:
            raise ValueError(
                f"{source} has {start.step} steps behind it, more than the {total_steps} of this command: raise "
                f"trainer.total_training_steps, or start anew with trainer.resume_mode=disable"
            )
        start.validation_due = checkpointing.validation_is_due(source)
        start.finished = total_steps == start.step and not start.validation_due
    return start


def _check_groups(config: DictConfig, source: Path, step: int) -> None:
    """Other modes go on with whole steps; and only a run from its start has the weights of every version."""
    trainer = config.trainer
    if trainer.replay:
        raise ValueError(
            f"trainer.replay draws with the weights of every step from the first one on, and {source} has {step} steps "
            "behind it: add trainer.resume_mode=disable, or choose another folder with trainer.experiment_name"
        )
    if trainer.mode != "fully_async" and "groups" in checkpointing.data_state(source):
        raise ValueError(
            f"{source} has trained prompts of later steps before those of earlier ones, as trainer.mode=fully_async "
            f"does, and trainer.mode={trainer.mode} would train them twice: go on with trainer.mode=fully_async"
        )


def _check_changes(config: DictConfig, source: Path, may_not: dict[str, str]) -> None:
    optimizer = f"{ARR}actor.optim.optimizer"
    if optimizer in may_not and "optimizer" in config.actor_rollout_ref.actor.checkpoint.load_contents:
        raise ValueError(
            f"{source} holds another optimizer's state ({may_not[optimizer]}): to start the new one fresh, add "
            f"trainer.resume_changes=allow {ARR}actor.checkpoint.load_contents=[model,extra]"
        )
    if may_not and config.trainer.resume_changes != "allow":
        raise ValueError(
            f"{source} is of another run than this command: {'; '.join(may_not.values())}. Go on with these changes "
            "with trainer.resume_changes=allow, start anew with trainer.resume_mode=disable, or choose another folder "
            "with trainer.experiment_name"
        )


def finished(start: Start) -> str:
    """What to tell a user whose run has nothing left to do."""
    return (
        f"The run in {start.source.parent} is finished: all {start.step} steps are done, and nothing was changed. "
        "Train longer with a higher trainer.total_training_steps, start anew with trainer.resume_mode=disable, or "
        "choose another folder with trainer.experiment_name."
    )
