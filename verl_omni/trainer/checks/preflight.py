"""All checks that need no worker: configuration, data files and the reward function."""

import dataclasses

from omegaconf import DictConfig, OmegaConf

from verl_omni.config import (
    DiffusionActorConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    validation_pipeline,
)
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.settings import check_size
from verl_omni.trainer.callbacks import callback_class
from verl_omni.trainer.checks.correction import without_weights
from verl_omni.trainer.checks.frozen import check_weights
from verl_omni.trainer.checks.precision import check_own_gpu
from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.trainer.checks.rewards import check_rewards
from verl_omni.trainer.checks.rewriter import check_prompts
from verl_omni.trainer.checks.workers import check_even
from verl_omni.trainer.run_folder.resuming import Start, plan_start
from verl_omni.utils.suggest import unknown

# Tokens that a model's template adds to a prompt, at most.
TEMPLATE_ROOM = 64


def preflight(config: DictConfig) -> DictConfig:
    """The resolved configuration; raises one clear line where the run could not work."""
    config = prepare_config(config)
    for spec in config.trainer.callbacks:
        callback_class(spec)  # raises where it cannot be one
    settings = OmegaConf.to_object(config)
    check_own_gpu(settings)
    check_weights(settings)
    check_data(config)
    if config.algorithm.sample_source == "online":
        check_agent_loops(config)
        check_rewards(config)
    return config


def check_start(config: DictConfig) -> Start:
    """Which checkpoint the prepared run goes on from: it is whole, and of this run."""
    from verl_omni.data.loading import load_datasets
    from verl_omni.data.prompt_loader import steps_for_epochs

    data, trainer = config.data, config.trainer
    total = trainer.total_training_steps
    if total is None and not trainer.val_only:
        total = steps_for_epochs(len(load_datasets(config)[0]), data.train_batch_size, trainer.total_epochs)
    start = plan_start(config, total or 0)
    if not start.finished and (line := without_weights(OmegaConf.to_object(config))):
        start.notices.append(line)
    return start


def check_data(config: DictConfig) -> None:
    """Files exist, have the right columns, and their prompts fit the model's limit."""
    from omegaconf import OmegaConf

    from verl_omni.data.loading import load_datasets

    train, val = load_datasets(config)
    if train is not None and len(train) < config.data.train_batch_size:
        raise ValueError(
            f"data.train_batch_size={config.data.train_batch_size} is more than the {len(train)} prompts of "
            "data.train_files: lower it or give more prompts"
        )
    if train is not None:
        check_step_numbers(config, len(train))
    if config.algorithm.sample_source == "offline":
        return  # prompts are encoded already
    model_config = OmegaConf.to_object(config.actor_rollout_ref.model)
    adapter = DiffusionModelBase.get_class(model_config)
    try:
        tokenizers = adapter.load_tokenizers(model_config)
    except Exception as error:  # whatever a tokenizer's own code raises
        folder = model_config.tokenizer_path or model_config.path
        raise ValueError(
            f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    rollout = OmegaConf.to_object(config.actor_rollout_ref.rollout)
    actor = OmegaConf.to_object(config.actor_rollout_ref.actor)
    both = (
        ("data.train_files", train, rollout.pipeline, True),
        ("data.val_files", val, validation_pipeline(rollout), rollout.share_samples),
    )
    for key, dataset, pipeline, shared in both:
        if dataset is None:
            continue
        for where, asked in dataset.sizes():
            check_row_size(where, dataclasses.replace(pipeline, **asked), model_config, actor if shared else None)
        dataset.check_unseen()
        least, most = adapter.images_of_a_prompt(model_config)
        if "images" in dataset.columns:
            other = adapter.with_images
            drawn = f", or type actor_rollout_ref.model.architecture={other} if these weights draw from them"
            dataset.check_images(least, most, "leave the column out" + (drawn if other else ""))
        elif least:
            raise ValueError(
                f"{model_config.architecture} draws from images, and {key} has none: give its rows a column `images`"
            )
        check_prompts(OmegaConf.to_object(config.actor_rollout_ref.rewriter), dataset.prompts())
        if adapter.tokenizes_images:
            continue
        rows, limit = [dataset[i] for i in range(len(dataset))], pipeline.max_sequence_length
        prompts = {row["prompt"] for row in rows}
        negatives = {row.get("negative_prompt") or pipeline.negative_prompt for row in rows}
        for tokenize, texts in ((adapter.tokenize, prompts), (adapter.tokenize_negative, negatives)):
            for text in texts:
                if len(text.encode()) + TEMPLATE_ROOM > limit:  # a token is a byte or more: the rest is short enough
                    tokenize(tokenizers, text, limit)


def check_row_size(
    where: str,
    pipeline: DiffusionPipelineConfig,
    model: DiffusionModelConfig,
    sharing: DiffusionActorConfig | None = None,
) -> None:
    """The model can draw the size that a row asks for, and ranks can share such a sample, where any do."""
    adapter = DiffusionModelBase.get_class(model)
    for name in ("num_frames", "audio_duration_s"):
        if (value := getattr(pipeline, name)) is not None and name not in adapter.pipeline_knobs(model):
            raise ValueError(f"{where}: {name}={value} has no effect on {model.architecture}: leave it out")
    check_size(f"{where}: ", pipeline, model)
    try:
        adapter.check(dataclasses.replace(model, pipeline=pipeline))
        if sharing is not None:
            check_even(pipeline, model, sharing)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def check_step_numbers(config: DictConfig, prompts: int) -> None:
    """The step to profile, and those to replay, are steps of this run."""
    from verl_omni.algorithms.forward_process import anchor_policies
    from verl_omni.data.prompt_loader import steps_for_epochs
    from verl_omni.trainer.diffusion.replay import check_replay, check_same_settings

    trainer = config.trainer
    steps = trainer.total_training_steps or steps_for_epochs(
        prompts, config.data.train_batch_size, trainer.total_epochs
    )
    if trainer.profile_step is not None and trainer.profile_step > steps:
        raise ValueError(f"trainer.profile_step={trainer.profile_step}: the run has {steps} steps; choose one of them")
    if trainer.replay is not None:
        check_same_settings(trainer.replay, config)
        arr = config.actor_rollout_ref
        compares = "old_velocity" in anchor_policies(arr.model.algorithm, OmegaConf.to_object(arr.actor))
        check_replay(
            trainer.replay,
            trainer.default_local_dir,
            steps,
            config.data.train_batch_size,
            most_behind=trainer.max_staleness if compares else None,
        )


def check_agent_loops(config: DictConfig) -> None:
    """The default one, and those that rows ask for, are registered."""
    from verl_omni.agent_loop.diffusion_agent_loop import AGENT_LOOPS
    from verl_omni.data.loading import load_datasets

    asked = {config.actor_rollout_ref.rollout.agent.default_agent_loop: "actor_rollout_ref.rollout.agent"}
    for key, dataset in zip(("data.train_files", "data.val_files"), load_datasets(config), strict=True):
        if dataset is not None and "agent_name" in dataset.columns:
            names = {dataset[i].get("agent_name") for i in range(len(dataset))}
            asked |= {name: key for name in names if name}
    for name, key in asked.items():
        if name not in AGENT_LOOPS:
            raise ValueError(unknown(f"agent loop in {key}", name, AGENT_LOOPS))
