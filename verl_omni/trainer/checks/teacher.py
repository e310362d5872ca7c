"""Whether a teacher can teach this student, found before a worker starts."""

from collections.abc import Mapping
from pathlib import Path

from verl_omni.algorithms.registry import get_diffusion_loss_fn
from verl_omni.config.actor import AUTO
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.trainer.checks.frozen import check_folder

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
        check_folder(f"{WHERE}.path", Path(str(folder)).expanduser(), arr.model)
    if teacher.n_gpus_per_node is not None:
        _check_own_devices(settings)


def _check_own_devices(settings: DiffusionTrainerConfig) -> None:
    """There is something to hold there, an engine that can, and rows for each."""
    from verl_omni.workers.engine.frozen import is_model
    from verl_omni.workers.engine.teachers import teacher_folders

    arr, teacher = settings.actor_rollout_ref, settings.actor_rollout_ref.actor.teacher
    shown = f"{WHERE}.n_gpus_per_node={teacher.n_gpus_per_node}"
    for folder in teacher_folders(teacher.path).values():
        if not is_model(Path(str(folder)).expanduser(), arr.model):
            raise ValueError(
                f"{shown} is for whole models, and {folder} is an adapter, which costs the training workers no second "
                "model: leave it out"
            )
    if arr.actor.strategy != "fsdp2":
        raise ValueError(
            f"{shown}: teachers on devices of their own are held by actor_rollout_ref.actor.strategy=fsdp2, and not by "
            f"{arr.actor.strategy}: set it, or leave {WHERE}.n_gpus_per_node out"
        )
    if arr.rewriter.path is not None:
        raise ValueError(f"{shown} does not go with actor_rollout_ref.rewriter.path: leave one of the two out")
    if arr.actor.ppo_micro_batch_size_per_gpu == AUTO and arr.ref.log_prob_micro_batch_size_per_gpu is None:
        raise ValueError(
            f"{shown}: actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=auto is found where training is; set "
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu for the teachers"
        )
    images = settings.data.train_batch_size * arr.rollout.n
    if settings.algorithm.trainer_type == "policy_gradient" and images % teacher.ranks:
        raise ValueError(
            f"data.train_batch_size * actor_rollout_ref.rollout.n = {images} images do not divide among the "
            f"{teacher.ranks} devices of {WHERE}.n_gpus_per_node * nnodes"
        )
