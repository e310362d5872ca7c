"""From what the user typed to a configuration that will run: fill in what is left open, refuse what cannot work.

Everything here happens before a worker starts, so that a mistake costs seconds.
"""

import dataclasses
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl_omni.algorithms.registry import (
    fill_nulls,
    get_algorithm,
    get_diffusion_adv_estimator_fn,
    resolve_algorithm_defaults,
)
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.schedulers.steps import get_step
from verl_omni.pipelines.schedulers.windows import check_window
from verl_omni.trainer.config.algorithm import DiffusionAlgoConfig
from verl_omni.trainer.config.schema import DiffusionTrainerConfig
from verl_omni.trainer.diffusion.preference_checks import check_trainer_fits
from verl_omni.utils.external_lib import import_external_lib
from verl_omni.utils.suggest import unknown
from verl_omni.utils.tracking import known_backends
from verl_omni.workers.config import DiffusionActorConfig, DiffusionPipelineConfig, validation_pipeline

TRAINER_TYPES = ("policy_gradient", "direct_preference")
SAMPLE_SOURCES = ("online", "offline")
ROLLOUT_ENGINES = ("diffusers",)
LR_SCHEDULES = ("constant", "linear", "cosine")


def prepare_config(config: DictConfig) -> DictConfig:
    """The resolved configuration, checked."""
    import_external_lib(config.actor_rollout_ref.model.external_lib)
    known = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DiffusionTrainerConfig), config))
    settings = _fill(known)
    _check(settings)
    return OmegaConf.structured(settings)


def _fill(settings: DiffusionTrainerConfig) -> DiffusionTrainerConfig:
    """What is left null becomes the algorithm's choice, or the model's."""
    arr = settings.actor_rollout_ref
    if arr.model.path is None:
        raise ValueError("actor_rollout_ref.model.path is not set: give the diffusers folder of the model to train")
    algorithm = get_algorithm(arr.model.algorithm)
    algo, loss = resolve_algorithm_defaults(arr.model.algorithm, arr.rollout.algo, arr.actor.diffusion_loss)
    arr.rollout.algo = arr.model.algo = algo
    arr.actor.diffusion_loss = loss
    adapter = DiffusionModelBase.get_class(arr.model)
    whose = f"the pipeline defaults of {adapter.__name__}"
    arr.rollout.pipeline = arr.model.pipeline = fill_nulls(arr.rollout.pipeline, adapter.pipeline_defaults, whose)
    chosen = {"trainer_type": algorithm.trainer_type, **algorithm.algorithm}
    defaults = {
        f.name: f.default for f in dataclasses.fields(DiffusionAlgoConfig) if f.default is not dataclasses.MISSING
    }
    settings.algorithm = fill_nulls(settings.algorithm, {**defaults, **chosen}, f'algorithm "{algorithm.name}"')
    return settings


def _check(settings: DiffusionTrainerConfig) -> None:
    arr, trainer = settings.actor_rollout_ref, settings.trainer
    _one_of("algorithm.trainer_type", settings.algorithm.trainer_type, TRAINER_TYPES)
    _one_of("algorithm.sample_source", settings.algorithm.sample_source, SAMPLE_SOURCES)
    _one_of("actor_rollout_ref.rollout.name", arr.rollout.name, ROLLOUT_ENGINES)
    _one_of("actor_rollout_ref.actor.strategy", arr.actor.strategy, ("fsdp2",))
    for name in trainer.logger:
        _one_of("trainer.logger", name, known_backends())
    if settings.data.train_files is None and not trainer.val_only:
        raise ValueError("data.train_files is not set: give a parquet or JSONL file of prompts")
    if settings.data.val_files is None and trainer.val_only:
        raise ValueError("trainer.val_only=true needs data.val_files: give a parquet or JSONL file of prompts")
    _check_engine(arr.actor)
    _check_effect(settings)
    get_diffusion_adv_estimator_fn(settings.algorithm.adv_estimator)
    if settings.algorithm.adv_estimator == "gdpo" and not settings.algorithm.reward_weights:
        raise ValueError(
            "algorithm.adv_estimator=gdpo adds up several rewards: name them, such as "
            "'algorithm.reward_weights={sharpness: 1, score: 0.5}'"
        )
    get_step(arr.rollout.algo.sde_type)
    adapter = DiffusionModelBase.get_class(arr.model)
    adapter.check(arr.model)
    check_trainer_fits(settings)
    _check_guidance(settings, adapter)
    for where, pipeline in (("", arr.rollout.pipeline), ("val_kwargs.", validation_pipeline(arr.rollout))):
        _check_size(f"actor_rollout_ref.rollout.{where}pipeline", pipeline, adapter, arr.model)
    _check_numbers(settings)


def _check_engine(actor: DiffusionActorConfig) -> None:
    """Names and numbers that only the worker would stumble over."""
    where = "actor_rollout_ref.actor."
    _one_of(f"{where}optim.lr_scheduler_type", actor.optim.lr_scheduler_type, LR_SCHEDULES)
    optimizers = [name for name, thing in vars(torch.optim).items() if isinstance(thing, type)]
    _one_of(f"{where}optim.optimizer", actor.optim.optimizer, optimizers)
    for name in ("dtype", "model_dtype"):
        value = getattr(actor.fsdp_config, name)
        if value is not None:
            _one_of(f"{where}fsdp_config.{name}", value, ("float32", "bfloat16", "float16"))
    for name in ("save_contents", "load_contents"):
        for value in getattr(actor.checkpoint, name):
            _one_of(f"{where}checkpoint.{name}", value, ("model", "optimizer", "extra", "export"))
    if not 0 <= actor.ema_decay < 1:
        raise ValueError(f"{where}ema_decay={actor.ema_decay}: expected 0 (none) or a number below 1, such as 0.99")


def _check_effect(settings: DiffusionTrainerConfig) -> None:
    """What would change nothing is refused: a run is not to look corrected or scored when it is not."""
    if not settings.actor_rollout_ref.hybrid_engine:
        raise ValueError(
            "actor_rollout_ref.hybrid_engine=false: the embedded engine generates on the devices that train; "
            "leave it true"
        )
    for name in ("rollout_is", "rollout_rs"):
        value = getattr(settings.algorithm.rollout_correction, name)
        if value is not None:
            raise ValueError(
                f"algorithm.rollout_correction.{name}={value}: the embedded engine samples with the weights that are "
                "trained, so there is nothing to correct; leave it null"
            )
    if settings.reward.reward_model.enable:
        raise ValueError(
            "reward.reward_model.enable=true: no reward model is served beside the training; call it in a function of "
            "your own (reward.custom_reward_function.path)"
        )


def _check_guidance(settings: DiffusionTrainerConfig, adapter: type[DiffusionModelBase]) -> None:
    algorithm = get_algorithm(settings.actor_rollout_ref.model.algorithm)
    if not algorithm.supports_cfg and adapter.cfg_scale(settings.actor_rollout_ref.model) > 1:
        raise ValueError(
            f'algorithm "{algorithm.name}" trains without classifier-free guidance: set '
            "actor_rollout_ref.rollout.pipeline.true_cfg_scale=1 (or guidance_scale=1)"
        )


def _check_size(where: str, pipeline: DiffusionPipelineConfig, adapter: type[DiffusionModelBase], model: Any) -> None:
    multiple = adapter.vae_scale_factor(dataclasses.replace(model, pipeline=pipeline)) * adapter.size_multiple
    for name in ("height", "width"):
        value = getattr(pipeline, name)
        if value < multiple or value % multiple:
            below = max(value // multiple, 1) * multiple
            raise ValueError(
                f"{where}.{name}={value} is no multiple of {multiple} (vae_scale_factor * {adapter.size_multiple}): "
                f"try {below} or {below + multiple}"
            )
    if pipeline.num_inference_steps < 1:
        raise ValueError(f"{where}.num_inference_steps={pipeline.num_inference_steps}: expected 1 or more")


def _check_numbers(settings: DiffusionTrainerConfig) -> None:
    arr, ranks = settings.actor_rollout_ref, settings.trainer.nnodes * settings.trainer.n_gpus_per_node
    prompts, mini, n = settings.data.train_batch_size, arr.actor.ppo_mini_batch_size, arr.rollout.n
    positive = {
        "data.train_batch_size": prompts,
        "actor_rollout_ref.rollout.n": n,
        "actor_rollout_ref.rollout.max_num_seqs": arr.rollout.max_num_seqs,
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": arr.actor.ppo_micro_batch_size_per_gpu,
        "actor_rollout_ref.actor.ppo_epochs": arr.actor.ppo_epochs,
        "actor_rollout_ref.rollout.agent.num_workers": arr.rollout.agent.num_workers,
        "reward.num_workers": settings.reward.num_workers,
        "trainer.n_gpus_per_node": settings.trainer.n_gpus_per_node,
        "trainer.nnodes": settings.trainer.nnodes,
    }
    if settings.trainer.max_ckpt_to_keep is not None:
        positive["trainer.max_ckpt_to_keep"] = settings.trainer.max_ckpt_to_keep
    if settings.trainer.total_training_steps is not None:
        positive["trainer.total_training_steps"] = settings.trainer.total_training_steps
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"{name}={value}: expected 1 or more")
    if prompts % mini:
        raise ValueError(
            f"data.train_batch_size={prompts} is no multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}: "
            "every optimizer step takes so many prompts"
        )
    if settings.algorithm.sample_source == "online" and (mini * n) % ranks:
        raise ValueError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size * actor_rollout_ref.rollout.n = {mini} * {n} images do not "
            f"divide among {ranks} devices"
        )
    if not 0 < settings.algorithm.timestep_fraction <= 1:
        raise ValueError(f"algorithm.timestep_fraction={settings.algorithm.timestep_fraction}: expected 0 < f <= 1")
    if settings.algorithm.trainer_type == "policy_gradient":
        check_window(arr.rollout.algo, DiffusionModelBase.get_class(arr.model).num_steps(arr.model))
    if settings.algorithm.sample_source == "online":
        if n < 2:
            raise ValueError("actor_rollout_ref.rollout.n=1: a group of one image has nothing to compare with; use 2+")


def _one_of(name: str, value: str, known: Any) -> None:
    if value not in known:
        raise ValueError(unknown(name, value, known))
