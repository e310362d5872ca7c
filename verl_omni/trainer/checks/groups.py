"""What groups of images cannot be: replaced, or cut into branches. Found before a worker starts."""

import dataclasses

from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.pipelines.settings import check_steps
from verl_omni.rewards.validation import has_own

WHERE = "algorithm.filter_groups.enable=true"


def check_filter(settings: DiffusionTrainerConfig) -> None:
    """Images are compared within a prompt, and a moving window counts training steps, not prompts."""
    rollout, mode = settings.actor_rollout_ref.rollout, settings.trainer.mode
    if not settings.algorithm.filter_groups.enable:
        return
    if rollout.n == 1:
        raise ValueError(
            f"{WHERE} compares the images of a prompt: set actor_rollout_ref.rollout.n to 2 or more, or leave it out"
        )
    if mode == "fully_async" and rollout.algo.sde_window_schedule not in (None, "random"):
        raise ValueError(
            f"{WHERE} with trainer.mode=fully_async takes more prompts than training steps have, by which "
            f"sde_window_schedule={rollout.algo.sde_window_schedule} would move: set trainer.mode=one_step_off, or "
            "actor_rollout_ref.rollout.algo.sde_window_schedule=random"
        )


def check_pairwise(settings: DiffusionTrainerConfig) -> None:
    """There are opponents, and nobody asks a comparison of a single image."""
    by, opponents = settings.reward.pairwise.by, settings.reward.pairwise.opponents
    rollout = settings.actor_rollout_ref.rollout
    if by is None:
        return
    manager = settings.reward.reward_manager
    if manager.source != "register" or manager.name != "image":
        raise ValueError(f"reward.pairwise.by={by} has no effect with a reward manager of your own: leave one out")
    size = rollout.algo.branches or rollout.n
    if (opponents or 1) >= size:
        raise ValueError(
            f"reward.pairwise.by={by} with {opponents or 1} opponents needs {(opponents or 1) + 1} images that are "
            f"compared, and there are {size}: raise actor_rollout_ref.rollout.n (or rollout.algo.branches)"
        )
    if by == "group" and opponents is not None:
        raise ValueError(
            f"reward.pairwise.opponents={opponents} has no effect with reward.pairwise.by=group, which shows "
            "all images of a prompt: leave it out"
        )
    if settings.algorithm.reward_weights and by != "group":
        raise ValueError(
            f"reward.pairwise.by={by} makes one reward, the win rate, and algorithm.adv_estimator="
            f"{settings.algorithm.adv_estimator} adds up several: leave one of them out"
        )
    if by != "score" and settings.data.val_files is not None and not has_own(settings):
        seen = "compares two images" if by == "pair" else "shows a reward the images of a group"
        raise ValueError(
            f"reward.pairwise.by={by} {seen}, and validation has a single one: name what scores that, such as "
            "'reward.validation.scorers=[{name: pickscore}]', or leave data.val_files out"
        )


def check_pool(settings: DiffusionTrainerConfig) -> None:
    """It is larger than what is kept of it, and cheaper; an image is decided by the noise that it starts from."""
    rollout, mode = settings.actor_rollout_ref.rollout, settings.trainer.mode
    pool, where = rollout.pool, f"actor_rollout_ref.rollout.pool.size={rollout.pool.size}"
    if pool.size is None:
        return
    steps = rollout.pipeline.num_inference_steps
    if pool.size <= rollout.n:
        raise ValueError(f"{where}: expected more than actor_rollout_ref.rollout.n={rollout.n}, which are kept of it")
    fewer = pool.num_inference_steps is not None and pool.num_inference_steps < steps
    if not fewer and (pool.precision in (None, rollout.precision) or (pool.num_inference_steps or 0) > steps):
        raise ValueError(
            f"{where} is drawn at less cost: set actor_rollout_ref.rollout.pool.num_inference_steps below the "
            f"rollout's own {steps}, or actor_rollout_ref.rollout.pool.precision=fp8"
        )
    cheap = dataclasses.replace(rollout.pipeline, num_inference_steps=pool.num_inference_steps or steps)
    check_steps("actor_rollout_ref.rollout.pool.", cheap, settings.actor_rollout_ref.model)
    others = {
        "actor_rollout_ref.rollout.algo.same_initial_noise=true": rollout.algo.same_initial_noise,
        f"actor_rollout_ref.rollout.algo.branches={rollout.algo.branches}": rollout.algo.branches,
    }
    for other in (name for name, is_on in others.items() if is_on):
        raise ValueError(
            f"{where} ranks images by the noise that they start from, which {other} gives to several: leave one out"
        )
    if settings.algorithm.filter_groups.enable or settings.reward.pairwise.by:
        other = "algorithm.filter_groups" if settings.algorithm.filter_groups.enable else "reward.pairwise"
        raise ValueError(f"{where} chooses images by their own scores, and so does {other}: leave one out")
    if mode == "fully_async" or (mode == "one_step_off" and settings.trainer.max_staleness):
        raise ValueError(
            f"{where} draws twice before a step is learned, and trainer.mode={mode} has drawn by then: set "
            "trainer.mode=colocated or separate"
        )


def check_branches(settings: DiffusionTrainerConfig) -> None:
    """Whole states, each with one stochastic step."""
    rollout = settings.actor_rollout_ref.rollout
    algo, where = rollout.algo, f"actor_rollout_ref.rollout.algo.branches={rollout.algo.branches}"
    if algo.branches and rollout.n % algo.branches:
        raise ValueError(f"{where} does not divide actor_rollout_ref.rollout.n={rollout.n}: set n to a multiple of it")
    if algo.branches and algo.sde_window_size != 1:
        raise ValueError(
            f"{where}: images part at one stochastic step; set actor_rollout_ref.rollout.algo.sde_window_size=1"
        )
