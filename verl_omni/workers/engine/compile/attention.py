"""The attention kernel that a user asked for, in every transformer.

diffusers' own switch passes over models whose attention calls torch directly (SD3 is one) and says nothing.
"""

from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers.engine.compile.attention_kernels import FLASH_4, TORCH_KERNELS, activate_flash_4


def attention_choice(
    asked: str | None, adapter: type[DiffusionModelBase], device: torch.device, dtype: torch.dtype
) -> tuple[str | None, str]:
    """(the backend, why): what the user asked for; on a GPU else the model's own; None leaves it to diffusers.

    A model's own is a kernel for 16 bits: in float32 torch has others.
    """
    knob = "actor_rollout_ref.actor.engine.attention_backend"
    if asked is not None:
        return asked, f"asked for by {knob}"
    if adapter.attention_backend is not None and device.type != "cpu" and dtype != torch.float32:
        return adapter.attention_backend, f"what works for {adapter.__name__} on a GPU; {knob} names another"
    return None, f"diffusers' default; {knob} names another"


class WithKernel:
    """An attention processor that leaves torch one kernel to choose."""

    def __init__(self, processor: Any, backend: str):
        self.processor, self.backend = processor, backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(TORCH_KERNELS[self.backend]):
            return self.processor(*args, **kwargs)


def choose_attention(part: torch.nn.Module, backend: str) -> None:
    """`backend` as diffusers names it, or flash_4; a model that does not ask diffusers can have torch's own kernels."""
    if backend == FLASH_4:
        activate_flash_4()
    part.set_attention_backend("_native_flash" if backend == FLASH_4 else backend)
    passed_over = [
        m for m in part.modules() if getattr(m, "processor", None) and not hasattr(m.processor, "_attention_backend")
    ]
    if not passed_over or backend == "native":
        return
    if backend not in TORCH_KERNELS:
        raise ValueError(
            f"attention_backend={backend} cannot be used with {type(part).__name__}, whose attention calls torch "
            f"directly. Set actor_rollout_ref.actor.engine.attention_backend to native, {', '.join(TORCH_KERNELS)}"
        )
    for module in passed_over:
        module.processor = WithKernel(module.processor, backend)
