"""Tensors without memory, of which some have values all the same: those by which a model decides what to compute.

How long a text is, say, is the sum of its mask. torch keeps such values of single numbers; here it does of more.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from verl_omni.perf.seen_before import Call, SeenBefore

aten = torch.ops.aten
FEW = 2**22  # such as tokens of many rows, not their features
FILLED = {
    aten.zeros.default, aten.ones.default, aten.full.default,
    aten.arange.default, aten.arange.start, aten.arange.start_step,
}  # fmt: skip


class KnownValues(FakeTensorMode):
    """What is computed from known values alone is known too, until something unknown is written into it."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._seen = SeenBefore(self)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a model is given instead of `tensor`, which may be a shape alone, on the meta device."""
        if tensor.device.type == "cpu" and is_telling(tensor):
            return self._known(tensor.clone(memory_format=torch.contiguous_format))
        with self:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs)
        if call.key and (before := self._seen.again(call)) is not None:
            return before
        out = super().dispatch(func, types, args, kwargs)
        if call.key:
            self._seen.remember(call, out)
        if func in FILLED and out.device.type == "cpu" and out.numel() <= FEW and _whole(out):
            with no_dispatch():
                made = func(*args, **(kwargs or {}))
            return self._known(made)
        return out

    def may_turn_const(self, t: torch.Tensor) -> bool:
        ours = t.device.type == "meta" or self.is_our_fake(t)
        return t.numel() <= FEW and t.layout == torch.strided and not ours

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.fake_tensor_converter.from_real_tensor(self, tensor, make_constant=True)


def is_telling(tensor: torch.Tensor) -> bool:
    """Whole numbers are known, and zeros: they say that something is absent."""
    return tensor.numel() <= FEW and (_whole(tensor) or not tensor.any())


def _whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()
