"""What direct-preference training cannot do, found before a worker starts."""

import torch

from verl_omni.algorithms.forward_process import anchor_policies, draw_sigmas, follows_old_policy, level_starts
from verl_omni.algorithms.registry import get_algorithm, get_diffusion_loss_fn
from verl_omni.config.actor import AUTO
from verl_omni.config.algorithm import DiffusionAlgoConfig
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.data.offline_pairs import check_takes_pairs
from verl_omni.pipelines.model_base import DiffusionModelBase


def check_trainer_fits(settings: DiffusionTrainerConfig) -> None:
    """The loss gets from the trainer what it needs, and samples come from where the trainer can take them."""
    from verl_omni.workers.engine.registry import REPLAYS

    trainer = settings.algorithm.trainer_type
    loss = settings.actor_rollout_ref.actor.diffusion_loss.loss_mode
    missing = set(get_diffusion_loss_fn(loss).required_model_output_keys) - REPLAYS[trainer].outputs
    if missing:
        other = "direct_preference" if trainer == "policy_gradient" else "policy_gradient"
        raise ValueError(
            f'algorithm.trainer_type={trainer} gives no {", ".join(sorted(missing))}, which loss "{loss}" needs: use '
            f"algorithm.trainer_type={other}, or leave it out"
        )
    if trainer == "direct_preference":
        check_preference(settings)
    elif settings.algorithm.sample_source == "offline":
        raise ValueError(
            f'algorithm.sample_source=offline: loss "{loss}" trains on its own rollouts; set it to online, or train '
            "cached pairs with actor_rollout_ref.model.algorithm=dpo"
        )


def _check_old_policy(settings: DiffusionTrainerConfig) -> None:
    """Knobs of an old policy are for those that have one: to sample with, or to stay close to."""
    arr = settings.actor_rollout_ref
    if follows_old_policy(arr.model.algorithm, arr.actor):
        return
    chosen = get_algorithm(arr.model.algorithm).algorithm
    for name in ("old_policy_decay_schedule", "old_policy_decay", "old_policy_update_interval"):
        value = getattr(settings.algorithm, name)
        if value not in (chosen.get(name), getattr(DiffusionAlgoConfig, name)):
            raise ValueError(
                f'algorithm.{name}={value} has no effect: algorithm "{arr.model.algorithm}" follows no old policy with '
                "these settings; leave it out"
            )


def _check_average(settings: DiffusionTrainerConfig) -> None:
    """What a loss compares with as a moving average is not the policy itself."""
    algorithm, arr = settings.algorithm, settings.actor_rollout_ref
    scheduled, decay = algorithm.old_policy_decay_schedule, algorithm.old_policy_decay
    copied = scheduled == "copy" if decay is None else decay == 0
    several = settings.data.train_batch_size > arr.actor.ppo_mini_batch_size or arr.actor.ppo_epochs > 1
    if not copied or several or algorithm.old_policy_update_interval > 1:
        return
    if "ema_velocity" in anchor_policies(arr.model.algorithm, arr.actor):
        raise ValueError(
            f"algorithm.{f'old_policy_decay_schedule={scheduled}' if decay is None else f'old_policy_decay={decay}'}: "
            f'the moving average that "{arr.model.algorithm}" compares with would be the policy itself; leave it out, '
            "or set algorithm.old_policy_decay=0.9"
        )


def _check_reward_gradient(settings: DiffusionTrainerConfig) -> None:
    """Images are decoded and scored where the weights are, with a gradient."""
    from verl_omni.workers.rollout import engine_class

    arr, name = settings.actor_rollout_ref, settings.actor_rollout_ref.model.algorithm
    if settings.algorithm.sample_source == "offline":
        raise ValueError(
            f"algorithm.sample_source=offline: {name} follows the reward of the model's own images, and cached pairs "
            "have none; leave it out"
        )
    if not arr.hybrid_engine:
        raise ValueError(
            f"trainer.mode={settings.trainer.mode}: {name} decodes images where the weights are trained; use "
            "trainer.mode=colocated"
        )
    if not hasattr(engine_class(arr.rollout.name), "with_reward"):
        raise ValueError(
            f"actor_rollout_ref.rollout.name={arr.rollout.name} has no VAE beside the trained weights, through which "
            f"{name} takes the reward's gradient: use diffusers"
        )
    made = DiffusionModelBase.get_class(arr.model).makes(arr.model)
    if made != "image":
        raise ValueError(f"{name} follows the rewards of images, and {arr.model.architecture} makes {made}: use awm")


def _check_chain(settings: DiffusionTrainerConfig, chained: int, steps: int) -> None:
    """Levels that are the rollout's, with so many of its steps after them."""
    algorithm, model = settings.algorithm, settings.actor_rollout_ref.model
    setting = f"actor_rollout_ref.actor.diffusion_loss.extra.steps={chained}"
    if DiffusionModelBase.get_class(model).has_own_step():
        raise ValueError(f"{setting}: it takes Euler's steps, and {model.architecture} has steps of its own; use 1")
    if algorithm.timestep_distribution not in ("last", "rollout"):
        raise ValueError(
            f"algorithm.timestep_distribution={algorithm.timestep_distribution}: with {setting} a level has to be one "
            "of the rollout's own, whose next steps are taken; use last or rollout"
        )
    if chained > steps:
        raise ValueError(f"{setting}: a rollout has {steps} steps; use {steps} or fewer")
    left = steps - chained + 1
    if (algorithm.timesteps_per_sample or 1) > left:
        raise ValueError(
            f"algorithm.timesteps_per_sample={algorithm.timesteps_per_sample}: with {setting} {left} of the rollout's "
            f"{steps} levels have so many steps after them; use {left} or fewer"
        )


def check_preference(settings: DiffusionTrainerConfig) -> None:
    algorithm, arr = settings.algorithm, settings.actor_rollout_ref
    loss_fn = get_diffusion_loss_fn(arr.actor.diffusion_loss.loss_mode)
    if arr.actor.use_kl_loss:
        raise ValueError(
            "actor_rollout_ref.actor.use_kl_loss=true is a KL between denoising steps, of which direct preference has "
            "none: set it to false; actor_rollout_ref.actor.diffusion_loss.extra says what this loss has instead"
        )
    if arr.rollout.algo.noise_level:
        raise ValueError(
            f"actor_rollout_ref.rollout.algo.noise_level={arr.rollout.algo.noise_level}: direct preference samples "
            "with the ODE; leave it out or set it to 0"
        )
    chained, steps = loss_fn.chained_steps(arr.actor), DiffusionModelBase.get_class(arr.model).num_steps(arr.model)
    if chained > 1:
        _check_chain(settings, chained, steps)
    levels = level_starts(torch.linspace(1, 0, steps + 1)[:-1], chained)
    draw_sigmas(1, algorithm.timesteps_per_sample or 1, algorithm.timestep_distribution, schedule=levels)
    _check_old_policy(settings)
    _check_average(settings)
    if algorithm.adv_mode != "continuous" and "advantages" not in loss_fn.required_data_keys:
        raise ValueError(
            f"algorithm.adv_mode={algorithm.adv_mode} has no effect: loss "
            f'"{arr.actor.diffusion_loss.loss_mode}" reads no advantages; leave it out'
        )
    micro = arr.actor.ppo_micro_batch_size_per_gpu
    if micro != AUTO and micro < loss_fn.rows_per_unit:
        raise ValueError(
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}: this loss compares {loss_fn.rows_per_unit} "
            f"images at a time; use {loss_fn.rows_per_unit} or more"
        )
    if "predicted_reward" in loss_fn.required_model_output_keys:
        _check_reward_gradient(settings)
    if algorithm.sample_source == "offline":
        check_takes_pairs(arr.model)
    if algorithm.sample_source == "offline" and (settings.data.val_files is not None or settings.trainer.val_only):
        raise ValueError(
            "algorithm.sample_source=offline starts no rollout engine, so that nothing can draw validation images: "
            "leave data.val_files and trainer.val_only out, and validate the exported weights in an online run with "
            "trainer.val_only=true"
        )
