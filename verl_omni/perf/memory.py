"""Out of memory, said with the knobs to turn."""

import functools
from collections.abc import Callable
from typing import Any

import torch

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
BFLOAT16 = f"set {ACTOR}.engine.model_dtype=bfloat16 (full fine-tuning: weights are held in float32)"
REFERENCE = f"set {REF}.param_offload=true (full fine-tuning with a reference)"
OPTIMIZER = f"set {ACTOR}.engine.optimizer_offload=true"
SAMPLES = f"set {ACTOR}.engine.sample_offload=true"
ENCODERS = f"set {ROLLOUT}.encoder_offload=true"
ADAPTERS = f"train adapters only ({MODEL}.lora_rank=32)"
INT8 = f"set {MODEL}.base_precision=int8 (LoRA: the frozen weights take half)"
TEACHERS = f"share the teachers between more GPUs ({ACTOR}.teacher.n_gpus_per_node)"
SHARE = "share the model between more GPUs (trainer.n_gpus_per_node)"

# What helps in a stage, what costs least first. Offloaded weights are back for the update.
KNOBS = {
    "loading of the model": [ADAPTERS, INT8, BFLOAT16, REFERENCE, SHARE],
    "loading of the checkpoint": [ENCODERS, OPTIMIZER, REFERENCE, SHARE],
    "rollout": [
        f"lower {ROLLOUT}.max_num_seqs",
        f"set {ROLLOUT}.cfg_in_one_forward=false",
        ENCODERS,
        SAMPLES,
        f"set {ACTOR}.engine.fold_lora=false",
        OPTIMIZER,
        f"set {ROLLOUT}.vae_tiling=true",
        INT8,
        f"set {ACTOR}.engine.compile_ahead=false, where it is the first",
    ],
    "rollout with vLLM-Omni": [
        f"lower {ROLLOUT}.max_num_seqs",
        f"set {ROLLOUT}.cfg_in_one_forward=false",
        OPTIMIZER,
        f"set {ROLLOUT}.vae_tiling=true",
    ],
    "reference pass": [f"lower {REF}.log_prob_micro_batch_size_per_gpu", ENCODERS, SAMPLES, OPTIMIZER, REFERENCE],
    "teacher's pass": [f"lower {REF}.log_prob_micro_batch_size_per_gpu", ENCODERS, SAMPLES, OPTIMIZER],
    "loading of the teachers": [TEACHERS],
    "pass of teachers on devices of their own": [f"lower {REF}.log_prob_micro_batch_size_per_gpu", SAMPLES, TEACHERS],
    "old log-probabilities": [f"lower {ACTOR}.ppo_micro_batch_size_per_gpu", ENCODERS, SAMPLES, OPTIMIZER],
    "update": [
        f"lower {ACTOR}.ppo_micro_batch_size_per_gpu",
        f"set {ACTOR}.engine.activation_memory_budget=0.5 (compiled blocks), or",
        f"set {MODEL}.enable_gradient_checkpointing=true",
        ENCODERS,
        SAMPLES,
        f"{OPTIMIZER} (full fine-tuning)",
        REFERENCE,
        BFLOAT16,
        ADAPTERS,
        INT8,
        SHARE,
    ],
}


def names_memory_knobs(stage: str) -> Callable:
    """Decorator: a torch.OutOfMemoryError in this stage names what to change."""

    choices = "".join(f"\n  - {knob}" for knob in KNOBS[stage])

    def wrap(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    f"the {stage} ran out of GPU memory. What may help:{choices}"
                ) from error

        return run

    return wrap
