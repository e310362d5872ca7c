"""What a start writes into the run's folder before its first step: its settings, a line about it, its trackers."""

from pathlib import Path

import ray
from omegaconf import DictConfig, OmegaConf

from verl_omni.report.starts import note_start, typed_command
from verl_omni.report.tracking import Tracking
from verl_omni.trainer.run_folder import checkpointing, wishes
from verl_omni.trainer.run_folder.resuming import Start
from verl_omni.utils.masking import masked


def open_folder(config: DictConfig, folder: Path, start: Start, total_steps: int) -> Tracking:
    """Where the metrics of this start go."""
    wishes.forget(folder)
    trainer, told = config.trainer, masked(OmegaConf.to_container(config, resolve=True))
    if not trainer.val_only:
        checkpointing.begin(folder, start.source)
    _write_config(told, folder / "config.yaml", start, trainer.val_only)
    # In an actor the command was typed elsewhere. Without a Ray the question itself would start one.
    in_cluster = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    note_start(folder, start.step, None if in_cluster else typed_command())
    return Tracking(
        list(trainer.logger),
        folder,
        trainer.project_name,
        trainer.experiment_name,
        config=told,
        resumed_step=start.step if start.source else None,
        total_steps=total_steps,
        only_adds=trainer.val_only,
    )


def _write_config(told: dict, path: Path, start: Start, val_only: bool) -> None:
    """`config.yaml` is that of the run's start; what changed later is written beside it, never over it."""
    if path.exists() and (start.source is not None or val_only):
        if val_only or not start.changed:
            return
        path = path.with_name(f"config.step_{start.step}.yaml")
    OmegaConf.save(OmegaConf.create(told), path)
