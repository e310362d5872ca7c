"""All checks that need no worker: configuration, data files and the reward function."""

import dataclasses
import importlib.util
import os
from typing import Any

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
from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.trainer.checks.rewriter import check_prompts
from verl_omni.trainer.checks.workers import check_even
from verl_omni.trainer.run_folder.resuming import Start, plan_start
from verl_omni.utils.hub import model_folder
from verl_omni.utils.suggest import nearest, unknown

# Tokens that a model's template adds to a prompt, at most.
TEMPLATE_ROOM = 64


def preflight(config: DictConfig) -> DictConfig:
    """The resolved configuration; raises one clear line where the run could not work."""
    config = prepare_config(config)
    for spec in config.trainer.callbacks:
        callback_class(spec)  # raises where it cannot be one
    check_weights(OmegaConf.to_object(config))
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


def check_reward_manager(config: DictConfig) -> None:
    """It is there, and it is for images: verl's own are for text."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    from verl_omni.utils.time_limit import time_limit

    manager = config.reward.reward_manager
    if manager.source == "register":
        known = [name for name, cls in REWARD_MANAGER.items() if not cls.__module__.startswith("verl.")]
        if manager.name not in known:
            raise ValueError(unknown("reward.reward_manager.name", manager.name, known))
        return
    if not manager.module.path:
        raise ValueError("reward.reward_manager.source=importlib needs reward.reward_manager.module.path=<file.py>")
    try:
        with time_limit(config.reward.timeout):
            resolve_reward_manager_cls(config)
    except Exception as error:
        raise ValueError(
            f'reward.reward_manager.module.path="{manager.module.path}" gives no class "{manager.name}" '
            f"(reward.reward_manager.name): {type(error).__name__}: {error}"
        ) from error


def check_judge(served: DictConfig, device: str) -> None:
    """It has a model, and devices where there are any."""
    from verl_omni.rewards.torch_models import refuse_code_of

    if not served.model_path:
        raise ValueError("reward.reward_model.enable=true needs reward.reward_model.model_path=<the judge's folder>")
    setting = "reward.reward_model.model_path"
    folder = os.path.expanduser(model_folder(served.model_path, weights=False, setting=setting))
    if os.path.isdir(folder) and "trust" not in served.command:  # --trust-remote-code is its user's own decision
        refuse_code_of(f'{setting}="{served.model_path}"', folder)
    if served.enable_resource_pool and not served.n_gpus_per_node:
        raise ValueError(
            "reward.reward_model.enable_resource_pool=true gives the judge GPUs of its own: say how many, "
            "reward.reward_model.n_gpus_per_node=1"
        )
    if device != "cuda" and served.n_gpus_per_node:
        raise ValueError(
            f"reward.reward_model.n_gpus_per_node={served.n_gpus_per_node}: there is no GPU here "
            f"(trainer.device={device}), and the judge would wait for one; leave it and enable_resource_pool out"
        )
    if device == "cuda" and not (served.enable_resource_pool and served.n_gpus_per_node):
        raise ValueError(
            "reward.reward_model.enable=true: the judge does not share the training's GPUs; give it its own with "
            "reward.reward_model.enable_resource_pool=true reward.reward_model.n_gpus_per_node=1, or start a server "
            "yourself and name it in reward.scorers.vlm_judge.address"
        )


def check_ground_truth(choice: Any, rows: list[dict[str, Any]]) -> None:
    """A reward that compares with the ground truth has one in every row."""
    from verl_omni.rewards.registry import reads

    if "ground_truth" not in reads(choice.name):
        return
    for row in rows:
        if row["reward_model"].get("ground_truth") is None:
            near = nearest("ground_truth", row["extra_info"]).replace("Did you mean", "Is it the column").rstrip()
            raise ValueError(
                f'the reward "{choice.label}" compares with the ground truth, and the prompt "{row["prompt"][:60]}" '
                f"has none: give the rows a column ground_truth, or choose another reward.{near}".removesuffix(".")
            )


def check_rewards(config: DictConfig) -> None:
    """The user's reward function loads and takes what it will be given, or every data source has a reward."""
    from verl_omni.algorithms.registry import get_diffusion_loss_fn
    from verl_omni.data.loading import load_datasets
    from verl_omni.data.prompt_rows import NO_SOURCE
    from verl_omni.rewards import check_package, check_settings, get_reward_fn
    from verl_omni.rewards.choice import OWN, read_choices, rewards_of, weighted
    from verl_omni.rewards.differentiable import check_differentiable
    from verl_omni.rewards.judge import with_judge
    from verl_omni.rewards.reward_loop import load_custom_reward_function
    from verl_omni.rewards.scoring import as_reward_function
    from verl_omni.trainer.checks.reward_trial import made_kind, scored_kind, try_gradient
    from verl_omni.utils.responses import KINDS
    from verl_omni.utils.responses import check_package as check_written

    check_reward_manager(config)
    scorers = config.reward.scorers
    choices = read_choices(OmegaConf.to_container(scorers, resolve=True) if scorers else None)
    served = config.reward.reward_model
    if served.enable:
        check_judge(served, config.trainer.device)
        named, choices = choices, with_judge(choices, "http://127.0.0.1", served.model_path)  # its port comes later
        if choices == named and not config.reward.custom_reward_function.path:
            raise ValueError(
                "reward.reward_model.enable=true starts a judge that nobody asks: name it as a reward, "
                "'reward.scorers=[{name: vlm_judge}]'"
            )
    for choice in choices.values():
        if choice.name == OWN and (choice.settings or choice.processes):
            given = next(iter(choice.settings), "processes")
            raise ValueError(
                f"reward.scorers.{choice.label}.{given} has no effect on a function of your own: its arguments are "
                f"reward.{OWN}.reward_kwargs, its processes reward.num_workers"
            )
        if choice.name != OWN:
            check_settings(choice.name, choice.settings, choice.label)
            check_package(choice.name)
    function, kind = load_custom_reward_function(config.reward), KINDS[scored_kind(config)]
    asked = config.actor_rollout_ref.rollout.http.port is not None
    if config.trainer.log_train_groups or config.data.val_files or asked:  # else no file is made of any response
        check_written(KINDS[made_kind(config)])
        if made_kind(config) == "video" and importlib.util.find_spec("av") is None:
            print("videos are kept as animations (GIF); as mp4 files with: pip install 'verl-omni[video]'", flush=True)
    own = function is not None
    if own:
        function.check_takes(kind)
    if config.reward.pairwise.by == "pair" and kind.name not in ("image", "video"):
        raise ValueError(f"reward.pairwise.by=pair compares pictures, and rewards are given {kind.name}: use by=score")
    if config.reward.pairwise.by == "group" and not (own and function.batched):
        raise ValueError(
            "reward.pairwise.by=group shows a function of yours all images of a prompt at once: name one in "
            "reward.custom_reward_function.path that takes `images`, or leave it out"
        )
    if own and function.compares and config.reward.pairwise.by != "pair":
        raise ValueError(
            f"reward function {function.name} compares two images (`other`): set reward.pairwise.by=pair, or take that "
            "parameter out"
        )
    added_up = weighted(choices)
    named = any(choice.name == OWN for choice in choices.values())
    if named and not own:
        raise ValueError(f"reward.scorers has {OWN}: say where it is, reward.{OWN}.path=<file.py>")
    if own and choices and not (named and added_up):
        raise ValueError(
            f"reward.scorers.{next(iter(choices))} is for the reward of a data_source, and reward.{OWN} takes its "
            f"place: give its settings in reward_kwargs there, or add both up with {{name: {OWN}, weight: 1}} in "
            "reward.scorers"
        )
    loss = get_diffusion_loss_fn(config.actor_rollout_ref.actor.diffusion_loss.loss_mode)
    follows = "predicted_reward" in loss.required_model_output_keys
    if follows:
        check_differentiable(config.reward)
    datasets = [dataset for dataset in load_datasets(config) if dataset is not None]
    rows = [dataset[i] for dataset in datasets for i in range(len(dataset))]
    if follows and own:
        try_gradient(config, function, rows[0])
    sources = {row["data_source"] for row in rows}
    used = set()
    for source in sources:
        if source == NO_SOURCE and not added_up and not own:
            raise ValueError(
                "no reward is named: the prompts have no data_source, so set "
                "reward.custom_reward_function.path=FILE.py or reward.scorers=[{name: ...}] (`verl-omni rewards` lists "
                "them)"
            )
        chosen = rewards_of(source, choices, own)
        used |= {choice.label for choice in chosen}
        for choice in chosen:
            if choice.name != OWN:
                get_reward_fn(choice.name)
                check_package(choice.name)
                check_settings(choice.name, choice.settings, choice.label)
                as_reward_function(None, choice).check_takes(kind)
                check_ground_truth(choice, [row for row in rows if row["data_source"] == source])
    for label, choice in choices.items():
        for source in choice.data_sources or ():
            if source not in sources:
                raise ValueError(
                    f"reward.scorers.{label}.data_sources: {unknown('data_source of the prompts', source, sources)}"
                )
        if label not in used:
            raise ValueError(f"reward.scorers.{label}: {unknown('data_source of the prompts', label, sources)}")
