"""From what the user typed to a configuration that will run: fill in what is left open, refuse what cannot work.

Everything here happens before a worker starts, so that a mistake costs seconds.
"""

import dataclasses
import os
import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_omni.algorithms.forward_process import anchor_policies
from verl_omni.algorithms.registry import (
    adds_up_rewards,
    fill_nulls,
    get_algorithm,
    get_diffusion_adv_estimator_fn,
    get_diffusion_loss_fn,
    resolve_algorithm_defaults,
    rewards_of,
)
from verl_omni.config import DiffusionPipelineConfig, validation_pipeline
from verl_omni.config.algorithm import DiffusionAlgoConfig
from verl_omni.config.keys import check_keys_of, structured, take_moved
from verl_omni.config.knob import Range, check_effect, check_ranges
from verl_omni.config.rollout import OF_SOME_MODELS
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.pipelines.causal_lm import CAUSAL_LM
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.model_folder import check_model_folder
from verl_omni.pipelines.schedulers.flow_match_sde import takes_own_steps
from verl_omni.pipelines.schedulers.steps import Step, gaussian, get_step, step_names
from verl_omni.pipelines.schedulers.windows import check_window
from verl_omni.pipelines.settings import check_size, check_steps
from verl_omni.rewards.choice import read_choices, weighted
from verl_omni.trainer.checks.correction import check_correction_fits, fill_correction
from verl_omni.trainer.checks.frozen import check_reference
from verl_omni.trainer.checks.groups import check_branches, check_filter, check_pairwise, check_pool
from verl_omni.trainer.checks.hub_names import pinned_names, with_names
from verl_omni.trainer.checks.machines import check_variables, with_absolute_paths
from verl_omni.trainer.checks.precision import check_precision
from verl_omni.trainer.checks.preference import check_trainer_fits
from verl_omni.trainer.checks.rewriter import check_rewriter
from verl_omni.trainer.checks.rollout_engine import (
    check_checkpoint_engine,
    check_gather,
    check_http,
    check_reward_input,
    check_rollout_engine,
    check_share_samples,
)
from verl_omni.trainer.checks.teacher import check_teacher
from verl_omni.trainer.checks.workers import check_workers
from verl_omni.utils.external_lib import import_external_lib
from verl_omni.utils.hub import copied

VAL = "actor_rollout_ref.rollout.val_kwargs"
DEFAULT_STALENESS = {"one_step_off": 1, "fully_async": 2}


def prepare_config(config: DictConfig) -> DictConfig:
    """The resolved configuration, checked."""
    import_external_lib(config.actor_rollout_ref.model.external_lib)
    check_keys_of(config)
    known = OmegaConf.merge(structured(), config)
    for line in take_moved(known):
        print(line, file=sys.stderr, flush=True)
    known = pinned_names(known)
    given, settings = OmegaConf.to_object(known), _fill(OmegaConf.to_object(known))
    check_ranges(settings)
    fill_correction(settings)
    check_effect(given, settings)
    _check(settings)
    settings.trainer.default_local_dir = os.path.expanduser(settings.trainer.default_local_dir)
    prepared = with_names(OmegaConf.structured(settings), known)
    # On this machine all processes have one folder, and a user sees the paths that were typed.
    return with_absolute_paths(prepared) if settings.ray.address else prepared


def _fill(settings: DiffusionTrainerConfig) -> DiffusionTrainerConfig:
    """What is left null becomes the algorithm's choice, or the model's."""
    arr = settings.actor_rollout_ref
    if arr.model.path is None and arr.rewriter.path is not None:  # a language model alone
        if arr.rewriter.train == "generator":
            raise ValueError(
                "actor_rollout_ref.rewriter.train=generator: there is no generator, as actor_rollout_ref.model.path is "
                "not set; name one, or leave it out"
            )
        arr.model.architecture, arr.rewriter.train = CAUSAL_LM, "rewriter"
    elif arr.model.path is None:
        raise ValueError(
            "actor_rollout_ref.model.path is not set: give the diffusers folder of the model to train, or its name "
            "on the Hugging Face hub"
        )
    else:
        check_model_folder(arr.model, weights=copied(arr.model.path) is None)
    algorithm = get_algorithm(arr.model.algorithm)
    algo, loss = resolve_algorithm_defaults(arr.model.algorithm, arr.rollout.algo, arr.actor.diffusion_loss)
    if algo.branches:  # one stochastic step each, at a place of its own
        alone = {"sde_window_size": 1, "sde_window_per_group": True}
        algo = fill_nulls(algo, alone, "branches")
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
    estimator = settings.algorithm.adv_estimator
    if not settings.algorithm.reward_weights and adds_up_rewards(estimator):
        choices = read_choices(settings.reward.scorers)
        if limited := next((label for label, choice in choices.items() if choice.data_sources), None):
            raise ValueError(
                f"reward.scorers.{limited}.data_sources: algorithm.adv_estimator={estimator} compares each reward over "
                "all images; give every reward to every row, or leave the estimator out"
            )
        settings.algorithm.reward_weights = weighted(choices)
    _fill_placement(settings)
    return settings


def _fill_placement(settings: DiffusionTrainerConfig) -> None:
    """One idea in the words of several documents: who draws, where, and when."""
    arr, trainer = settings.actor_rollout_ref, settings.trainer
    for name in ("n_gpus_per_node", "nnodes"):
        short, long = getattr(settings.rollout, name), getattr(arr.rollout, name)
        if short is not None and long not in (None, short):
            raise ValueError(f"rollout.{name}={short} and actor_rollout_ref.rollout.{name}={long} are one setting")
        setattr(arr.rollout, name, long if short is None else short)
    if not arr.hybrid_engine and trainer.mode == "colocated":
        trainer.mode = "separate"
    arr.hybrid_engine = trainer.mode == "colocated"
    if trainer.max_staleness is None:
        trainer.max_staleness = DEFAULT_STALENESS.get(trainer.mode)


def _check(settings: DiffusionTrainerConfig) -> None:
    arr, trainer = settings.actor_rollout_ref, settings.trainer
    if settings.data.train_files is None and not trainer.val_only:
        raise ValueError("data.train_files is not set: give a parquet, JSONL or text file of prompts")
    if settings.data.val_files is None and trainer.val_only:
        raise ValueError("trainer.val_only=true needs data.val_files: give a parquet, JSONL or text file of prompts")
    _check_estimator(settings.algorithm)
    loss = arr.actor.diffusion_loss
    get_diffusion_loss_fn(loss.loss_mode).check_extra(loss.extra, "actor_rollout_ref.actor.diffusion_loss.extra")
    adapter = DiffusionModelBase.get_class(arr.model)
    _check_adapter(settings, adapter)
    adapter.check(arr.model)
    check_trainer_fits(settings)
    _check_noise(settings, adapter)
    _check_guidance(settings, adapter)
    for where, pipeline in (("", arr.rollout.pipeline), ("val_kwargs.", validation_pipeline(arr.rollout))):
        check_size(f"actor_rollout_ref.rollout.{where}pipeline.", pipeline, arr.model)
        check_steps(f"actor_rollout_ref.rollout.{where}pipeline.", pipeline, arr.model)
        _check_reads(f"actor_rollout_ref.rollout.{where}pipeline", pipeline, adapter, arr.model)
    _check_placement(settings)
    check_rollout_engine(settings)
    check_reward_input(settings)
    check_checkpoint_engine(settings)
    check_gather(settings)
    check_share_samples(settings)
    check_http(settings)
    check_correction_fits(settings)
    check_filter(settings)
    check_branches(settings)
    check_pairwise(settings)
    check_pool(settings)
    check_precision(settings)
    check_teacher(settings)
    check_reference(settings)
    check_rewriter(settings)
    _check_numbers(settings)
    _check_best(settings)
    check_workers(settings)
    check_variables(settings)


def _check_adapter(settings: DiffusionTrainerConfig, adapter: type[DiffusionModelBase]) -> None:
    """It has the methods that this run calls."""
    arr = settings.actor_rollout_ref
    missing, caller = adapter.missing_for_training(), "training"
    if settings.algorithm.sample_source == "online":
        missing += adapter.missing_for_rollout()
        caller = f"the rollout engine (actor_rollout_ref.rollout.name={arr.rollout.name})"
    if missing:
        raise ValueError(
            f"{adapter.__name__}, the adapter of {arr.model.architecture}, has no {', '.join(missing)}: {caller} calls "
            "these classmethods; write them as docs/integrating_a_diffusion_model.md shows"
        )


def _check_estimator(algorithm: DiffusionAlgoConfig) -> None:
    """It is there, and has the weights of several rewards if and only if it adds them up."""
    rewards = rewards_of(get_diffusion_adv_estimator_fn(algorithm.adv_estimator))
    weights = algorithm.reward_weights
    if rewards == "several" and not weights:
        raise ValueError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} adds up several rewards: name them in reward.scorers "
            "with their weights, or those that your function returns, such as "
            "'algorithm.reward_weights={sharpness: 1, score: 0.5}'"
        )
    if weights and rewards == "one":
        raise ValueError(
            f"algorithm.reward_weights={dict(weights)} has no effect with algorithm.adv_estimator="
            f"{algorithm.adv_estimator}, which takes one reward: set algorithm.adv_estimator=gdpo"
        )
    for name, weight in weights.items():
        Range().check(f"algorithm.reward_weights.{name}", weight)


def _check_placement(settings: DiffusionTrainerConfig) -> None:
    """Settings of rollout servers are for runs that have some."""
    arr = settings.actor_rollout_ref
    if not arr.hybrid_engine and settings.algorithm.sample_source == "offline":
        raise ValueError(
            f"trainer.mode={settings.trainer.mode} (actor_rollout_ref.hybrid_engine=false): cached pairs need no "
            "rollout servers; leave it out"
        )
    for name in ("n_gpus_per_node", "nnodes"):
        value = getattr(arr.rollout, name)
        if arr.hybrid_engine and value is not None:
            raise ValueError(
                f"actor_rollout_ref.rollout.{name}={value} is for rollout servers: set trainer.mode=separate "
                "(actor_rollout_ref.hybrid_engine=false), one_step_off or fully_async, or leave it out"
            )
    _check_staleness(settings)


def _check_staleness(settings: DiffusionTrainerConfig) -> None:
    """What earlier weights draw can be learned from."""
    arr, trainer = settings.actor_rollout_ref, settings.trainer
    if trainer.mode == "one_step_off" and trainer.max_staleness > 1:
        raise ValueError(
            f"trainer.max_staleness={trainer.max_staleness}: trainer.mode=one_step_off draws one step ahead; expected "
            "0 or 1, or set trainer.mode=fully_async"
        )
    if not trainer.max_staleness:
        if trainer.stale_groups != "drop":
            raise ValueError(
                f"trainer.stale_groups={trainer.stale_groups} has no effect with trainer.max_staleness=0, where "
                "nothing is behind: leave it out"
            )
        return
    if "old_velocity" in anchor_policies(arr.model.algorithm, arr.actor) and trainer.stale_groups == "keep":
        raise ValueError(
            f"trainer.stale_groups=keep: {arr.model.algorithm} compares with the policy that drew the samples, and "
            "only those of the last max_staleness + 1 steps are kept: leave it drop"
        )
    if arr.actor.old_log_probs == "train":
        raise ValueError(
            "actor_rollout_ref.actor.old_log_probs=train takes the weights that learn for those that drew the samples, "
            f"which trainer.mode={trainer.mode} does not have: leave it null, or set rollout or recompute"
        )


def _check_guidance(settings: DiffusionTrainerConfig, adapter: type[DiffusionModelBase]) -> None:
    algorithm = get_algorithm(settings.actor_rollout_ref.model.algorithm)
    if not algorithm.supports_cfg and adapter.cfg_scale(settings.actor_rollout_ref.model) > 1:
        raise ValueError(
            f'algorithm "{algorithm.name}" trains without classifier-free guidance: set '
            "actor_rollout_ref.rollout.pipeline.true_cfg_scale=1 (or guidance_scale=1)"
        )


def _check_noise(settings: DiffusionTrainerConfig, adapter: type[DiffusionModelBase]) -> None:
    """Steps are as noisy as their type allows, and a policy gradient has noise to learn from."""
    rollout = settings.actor_rollout_ref.rollout
    algo, val = rollout.algo, rollout.val_kwargs
    model = settings.actor_rollout_ref.model
    step, val_step = (_step(name, adapter, model) for name in (algo.sde_type, val.sde_type or algo.sde_type))
    step.noise_levels.check(f"actor_rollout_ref.rollout.algo.noise_level (sde_type={step.name})", algo.noise_level)
    val_step.noise_levels.check(f"{VAL}.noise_level (sde_type={val_step.name})", val.noise_level)
    trained = settings.algorithm.trainer_type == "policy_gradient" and not settings.trainer.val_only
    if trained and not step.adds_noise(algo.noise_level):
        noisy = [name for name in step_names() if get_step(name).adds_noise(0.5)]
        raise ValueError(
            f"actor_rollout_ref.rollout.algo.sde_type={step.name} with noise_level={algo.noise_level} adds no noise: "
            f"no step has a probability that could be trained. Set a noise_level above 0 and sde_type to one of "
            f"{', '.join(noisy)}"
        )
    if trained:
        _check_density(settings.actor_rollout_ref.actor.diffusion_loss.loss_mode, step)
    if val.noise_level and not val_step.adds_noise(val.noise_level):
        raise ValueError(
            f"{VAL}.noise_level={val.noise_level} has no effect with sde_type={val_step.name}: set {VAL}.sde_type too"
        )


def _check_density(loss: str, step: Step) -> None:
    """A formula that divides by what a Gaussian log-probability is divided by, or cancels what it holds."""
    if not get_diffusion_loss_fn(loss).gaussian_steps or step.density is gaussian:
        return
    fitting = [name for name in step_names() if get_step(name).density is gaussian and get_step(name).adds_noise(0.5)]
    raise ValueError(
        f'loss "{loss}" is for steps with a Gaussian log-probability, which sde_type={step.name} does not have: set '
        f"actor_rollout_ref.rollout.algo.sde_type to one of {', '.join(fitting)}, or choose another algorithm"
    )


def _step(sde_type: str, adapter: type[DiffusionModelBase], model: Any) -> Step:
    """The step of that name. One that the adapter's own scheduler knows is taken to be as noisy as its level says."""
    if sde_type in step_names() or not takes_own_steps(adapter.build_scheduler(model)):
        return get_step(sde_type)
    return Step(sde_type, lambda x, v, sigma, sigma_next, noise_level: (x, noise_level))


def _check_reads(where: str, pipeline: DiffusionPipelineConfig, adapter: type[DiffusionModelBase], model: Any) -> None:
    """A setting that this architecture does not have is refused: it would be ignored."""
    read = adapter.pipeline_knobs(model)
    for name in OF_SOME_MODELS:
        value, default = getattr(pipeline, name), getattr(DiffusionPipelineConfig, name)
        if name not in read and value not in (None, default):
            others = f": it has {', '.join(sorted(read))}" if read else ""
            raise ValueError(f"{where}.{name}={value} has no effect on {model.architecture}{others}; leave it out")
    made = adapter.makes(model)
    for name in ("height", "width") if "audio_duration_s" in read and made == "sound" else ():
        if (value := getattr(pipeline, name)) != getattr(DiffusionPipelineConfig, name):
            raise ValueError(f"{where}.{name}={value} has no effect on {model.architecture}: it makes sounds")
    if model.algo.audio_share is not None and made != "video with sound":
        raise ValueError(
            f"actor_rollout_ref.rollout.algo.audio_share={model.algo.audio_share} is for a video with sound, and "
            f"{model.architecture} makes {made}: leave it out"
        )


def _check_best(settings: DiffusionTrainerConfig) -> None:
    """A validation says which checkpoint is the best."""
    trainer = settings.trainer
    if trainer.keep_best and (settings.data.val_files is None or not trainer.test_freq):
        raise ValueError(
            "trainer.keep_best=true compares validations, and this run has none: set data.val_files and a "
            "trainer.test_freq other than 0, or leave it out"
        )


def _check_numbers(settings: DiffusionTrainerConfig) -> None:
    arr = settings.actor_rollout_ref
    prompts, mini, n = settings.data.train_batch_size, arr.actor.ppo_mini_batch_size, arr.rollout.n
    if prompts % mini:
        raise ValueError(
            f"data.train_batch_size={prompts} is no multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}: "
            "every optimizer step takes so many prompts"
        )
    if settings.algorithm.trainer_type == "policy_gradient":
        check_window(arr.rollout.algo, DiffusionModelBase.get_class(arr.model).num_steps(arr.model))
    if settings.algorithm.sample_source == "online":
        if n < 2:
            raise ValueError("actor_rollout_ref.rollout.n=1: a group of one image has nothing to compare with; use 2+")
