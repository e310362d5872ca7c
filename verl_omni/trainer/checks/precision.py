"""What cannot be computed in 8 bits, or would change nothing. Found before a worker starts."""

import torch

from verl_omni.algorithms.registry import get_algorithm, get_diffusion_loss_fn
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.workers.engine.fp8 import refuse_old_gpu
from verl_omni.workers.engine.registry import engine_class as training_engine
from verl_omni.workers.losses import build_loss_function
from verl_omni.workers.rollout import engine_class

ARR = "actor_rollout_ref"


def in_8_bits(settings: DiffusionTrainerConfig) -> dict[str, str]:
    """What a run asks for, by the names of its settings."""
    arr = settings.actor_rollout_ref
    places = {"rollout": arr.rollout, "rollout.pool": arr.rollout.pool, "ref": arr.ref}
    return {f"{ARR}.{name}.precision": place.precision for name, place in places.items() if place.precision}


def check_precision(settings: DiffusionTrainerConfig) -> None:
    arr, asked = settings.actor_rollout_ref, in_8_bits(settings)
    if not asked and arr.actor.engine.fp8_modules is not None:
        raise ValueError(
            f"{ARR}.actor.engine.fp8_modules has no effect where nothing is computed in 8 bits: set "
            f"{ARR}.rollout.precision=fp8, or leave it out"
        )
    modules = arr.actor.engine.fp8_modules
    if modules is not None and not (isinstance(modules, list) and modules and all(isinstance(m, str) for m in modules)):
        raise ValueError(
            f"{ARR}.actor.engine.fp8_modules={modules}: expected a list of names, such as [to_q,to_k,to_v], or null"
        )
    draws = engine_class(arr.rollout.name)
    for name, precision in asked.items():
        if precision not in draws.precisions:
            raise ValueError(
                f"{name}={precision}: {ARR}.rollout.name={arr.rollout.name} {draws.why_no_precision}; leave it out, or "
                "choose diffusers"
            )
    if arr.ref.precision is not None:
        _check_reference(settings)


def check_own_gpu(settings: DiffusionTrainerConfig) -> None:
    """Of a run on this machine. Of others, the GPU that is to do it says so; a plan asks no GPU."""
    here = settings.trainer.device != "cpu" and settings.ray.address is None
    if in_8_bits(settings) and here and torch.cuda.is_available():
        refuse_old_gpu("cuda")


def _check_reference(settings: DiffusionTrainerConfig) -> None:
    """Its means are compared with those that drew, by the weights that learn."""
    arr, where = settings.actor_rollout_ref, f"{ARR}.ref.precision={settings.actor_rollout_ref.ref.precision}"
    if settings.algorithm.trainer_type != "policy_gradient" or not build_loss_function(arr.actor).needs_reference:
        raise ValueError(
            f"{where} has no effect where no mean is compared with the reference's: set {ARR}.actor.use_kl_loss=true, "
            "or leave it out"
        )
    if settings.trainer.max_staleness or get_algorithm(arr.model.algorithm).rollout_policy != "current":
        raise ValueError(
            f"{where} takes the means that drew for those of the policy that learns, and here another one draws: leave "
            "it out, or set trainer.mode=colocated or separate"
        )
    if arr.actor.old_log_probs == "rollout":
        raise ValueError(
            f"{where} needs old means of the training graph: leave {ARR}.actor.old_log_probs=rollout (or "
            "algorithm.rollout_correction.bypass_mode) out"
        )
    loss = arr.actor.diffusion_loss.loss_mode
    if "log_probs" not in get_diffusion_loss_fn(loss).required_model_output_keys:
        raise ValueError(
            f'{where} needs old means of the training graph, and loss "{loss}", which has no ratio, asks for none: '
            "leave it out"
        )
    trains = training_engine(arr.actor.strategy)
    ranks, shared = trains.shared_by(trains.settings(arr.actor))
    if ranks > 1:
        raise ValueError(f"{where} is for ranks that compute whole samples: leave it out, or {shared}")
