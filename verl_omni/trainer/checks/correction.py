"""When the rollout's policy is another one than training's, and what is done about it unless the user says so."""

import inspect

import torch

from verl_omni.algorithms.registry import get_diffusion_loss_fn
from verl_omni.algorithms.rollout_correction import check_correction, is_on, weighs
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.workers.engine.module import on_gpu, resolve_dtypes, rounds_alike

WHERE = "algorithm.rollout_correction"


def same_arithmetic(settings: DiffusionTrainerConfig) -> bool:
    """Whether weights draw with the log-probabilities that training gives them, to the last bit."""
    from verl_omni.workers.engine.registry import engine_class as training_engine
    from verl_omni.workers.rollout import engine_class

    arr, trainer = settings.actor_rollout_ref, settings.trainer
    device = torch.device(trainer.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    training, lora = arr.actor.engine, arr.model.lora_rank > 0
    alike = rounds_alike(
        resolve_dtypes(training, device, lora)[0],
        compiled=on_gpu(training.use_torch_compile, device),
        # on a GPU: if there is room
        folded=lora and not arr.model.base_precision and arr.hybrid_engine and on_gpu(training.fold_lora, device),
        device=device,
    )
    trains = training_engine(arr.actor.strategy)
    alike = alike and not trains.cuts_samples(trains.settings(arr.actor))
    return alike and arr.rollout.precision is None and engine_class(arr.rollout.name).same_arithmetic


def fill_correction(settings: DiffusionTrainerConfig) -> None:
    """What is compared with what. Stale samples are weighed where their ratios are not to the policy that drew them.

    There a pass before the update has been paid for already: the weights cost nothing more. Where the arithmetic is the
    same, no such pass is needed, and the loss's own ratio is the weight.
    """
    actor, correction = settings.actor_rollout_ref.actor, settings.algorithm.rollout_correction
    asked = "rollout" if correction.bypass_mode else "recompute" if is_on(correction) else None
    if asked is None:
        if actor.old_log_probs is None and _draws_ahead(settings) and not same_arithmetic(settings):
            correction.rollout_is = "step" if _takes_weights(settings) else None
        asked = "recompute" if is_on(correction) else None
    if asked is None:
        return
    if actor.old_log_probs not in (None, asked):
        knobs = "rollout_is and rollout_rs" if asked == "recompute" else "bypass_mode"
        raise ValueError(
            f"actor_rollout_ref.actor.old_log_probs={actor.old_log_probs}: {knobs} of {WHERE} go with old_log_probs="
            f"{asked}; leave one of the two out"
        )
    actor.old_log_probs = asked


def check_correction_fits(settings: DiffusionTrainerConfig) -> None:
    """There is something to correct, and something that is corrected."""
    correction = settings.algorithm.rollout_correction
    if not is_on(correction) and not correction.bypass_mode:
        return
    if settings.algorithm.trainer_type != "policy_gradient":
        raise ValueError(f"{WHERE} is for policy gradient: direct preference has no log-probabilities")
    if settings.actor_rollout_ref.hybrid_engine and same_arithmetic(settings):
        raise ValueError(
            f"{WHERE} has no effect where the rollout draws with the weights that are trained, in float32 as training "
            "does: leave it out, or set trainer.mode=separate, one_step_off or fully_async"
        )
    check_correction(correction)
    if weighs(correction) and not _takes_weights(settings):
        loss = type(get_diffusion_loss_fn(settings.actor_rollout_ref.actor.diffusion_loss.loss_mode)).__name__
        raise ValueError(f"{WHERE}.rollout_is would change nothing: {loss}.compute_loss takes no rollout_is_weights")


def without_weights(settings: DiffusionTrainerConfig) -> str | None:
    """A line for the start of a run that learns from stale samples as if they were not."""
    correction, old = settings.algorithm.rollout_correction, settings.actor_rollout_ref.actor.old_log_probs
    if not _draws_ahead(settings) or is_on(correction) or old == "rollout" or same_arithmetic(settings):
        return None
    why = "actor_rollout_ref.actor.old_log_probs=recompute" if _takes_weights(settings) else "the loss takes none"
    return f"Stale samples are learned from without weights for their staleness ({why}): {WHERE} is off."


def _draws_ahead(settings: DiffusionTrainerConfig) -> bool:
    return settings.algorithm.trainer_type == "policy_gradient" and bool(settings.trainer.max_staleness)


def _takes_weights(settings: DiffusionTrainerConfig) -> bool:
    loss = get_diffusion_loss_fn(settings.actor_rollout_ref.actor.diffusion_loss.loss_mode)
    return "rollout_is_weights" in inspect.signature(loss.compute_loss).parameters
