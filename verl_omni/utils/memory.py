"""Out of memory, said with the knob to turn."""

import functools
from collections.abc import Callable
from typing import Any

import torch

ADVICE = (
    "lower {knob}, set actor_rollout_ref.model.enable_gradient_checkpointing=true, or keep less on the device with "
    "actor_rollout_ref.rollout.encoder_offload=true, "
    "actor_rollout_ref.actor.fsdp_config.param_offload, optimizer_offload or fold_lora=false"
)


def names_memory_knobs(stage: str, knob: str) -> Callable:
    """Decorator: a torch.OutOfMemoryError in this stage names what to change."""

    def wrap(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    f"the {stage} ran out of GPU memory: {ADVICE.format(knob=knob)}"
                ) from error

        return run

    return wrap
