"""Whether a teacher can teach this student, found before a worker starts."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from verl_omni.algorithms.registry import get_diffusion_loss_fn
from verl_omni.config import DiffusionModelConfig
from verl_omni.config.model import read_architecture
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.pipelines.model_base import DiffusionModelBase

WHERE = "actor_rollout_ref.actor.teacher"


def check_teacher(settings: DiffusionTrainerConfig) -> None:
    """There is one where a loss needs it; its weights can take the place of the trained ones; its steps are theirs."""
    from verl_omni.workers.engine.teachers import teacher_folders

    arr = settings.actor_rollout_ref
    teacher, loss = arr.actor.teacher, arr.actor.diffusion_loss.loss_mode
    keys = get_diffusion_loss_fn(loss).data_keys(arr.actor)
    alone = any(key.startswith("teacher_") for key in keys)
    if teacher.path is not None and settings.algorithm.trainer_type == "direct_preference" and not alone:
        raise ValueError(
            f'{WHERE}.path={teacher.path} has no effect: loss "{loss}" asks no teacher; on the forward process '
            "actor_rollout_ref.model.algorithm=opd_forward does"
        )
    if alone and teacher.path is None:
        raise ValueError(f'loss "{loss}" learns from a teacher: set {WHERE}.path to the folder of its weights')
    if alone and settings.algorithm.sample_source == "offline":
        raise ValueError(
            f'algorithm.sample_source=offline: loss "{loss}" asks a teacher of the student\'s own images, and cached '
            "pairs have none; leave it out"
        )
    if alone and teacher.coef is not None:
        raise ValueError(f'{WHERE}.coef={teacher.coef} has no effect: loss "{loss}" has no other term; leave it out')
    if not isinstance(teacher.path, str | None) and not (isinstance(teacher.path, Mapping) and teacher.path):
        raise ValueError(f"{WHERE}.path={teacher.path}: expected a folder, or {{data_source: folder}} for several")
    for folder in teacher_folders(teacher.path).values():
        _check_weights(Path(str(folder)).expanduser(), arr.model)
        _check_schedule(Path(folder).expanduser(), arr.model)


def _check_weights(folder: Path, model: DiffusionModelConfig) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"{WHERE}.path={folder} is no folder: give the teacher's weights")
    if model.lora_rank and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{WHERE}.path={folder} holds no LoRA weights (*.safetensors): a student of lora_rank={model.lora_rank} "
            "learns from an adapter of the same base, such as a run's global_step_N/export"
        )
    if not model.lora_rank and not any((folder / model.transformer_subfolder).glob("*.safetensors")):
        raise ValueError(
            f"{WHERE}.path={folder} holds no {model.transformer_subfolder}/*.safetensors: a student of which all "
            "weights are trained learns from a model's folder, or a run's global_step_N/export"
        )


def _check_schedule(folder: Path, model: DiffusionModelConfig) -> None:
    """A model's folder says how it steps: as the student does. Weights alone step as the student."""
    if not (folder / "model_index.json").is_file():
        return
    if (theirs := read_architecture(str(folder))) != model.architecture:
        raise ValueError(f"{WHERE}.path={folder} is a {theirs}, and the student a {model.architecture}")
    own, other = _schedule(model), _schedule(dataclasses.replace(model, path=str(folder)))
    if len(own) != len(other) or not torch.equal(own, other):
        raise ValueError(
            f"{WHERE}.path={folder} steps at other timesteps or sigmas than the student: {_few(other)} in place of "
            f"{_few(own)}; its scheduler's config has to be the student's"
        )


def _schedule(model: DiffusionModelConfig) -> torch.Tensor:
    adapter = DiffusionModelBase.get_class(model)
    scheduler = adapter.build_scheduler(model)
    adapter.set_timesteps(scheduler, model, "cpu")
    return torch.cat([scheduler.timesteps.float(), scheduler.sigmas.float()])


def _few(schedule: torch.Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in schedule[:4].tolist()) + ", ..."
