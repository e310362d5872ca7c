"""What operations on tensors without memory give, remembered by what they are given.

torch works out of each what it gives, every time anew, and takes a quarter of a millisecond; blocks that are alike ask
the same thousands of times. Of tensors that have values nothing is remembered.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

PLAIN = {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
LISTS = {tuple, list, torch.Size}
BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


@dataclass(frozen=True)
class Output:
    """A tensor with memory of its own, or a view of one that was given, or that one itself."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    of: int | None = None
    itself: bool = False


class SeenBefore:
    def __init__(self, mode: FakeTensorMode):
        self.mode = mode
        self._outputs: dict[tuple, tuple[type, list[Output]]] = {}

    def again(self, call: "Call") -> Any:
        """What it gives; None where that was not seen before."""
        if (found := self._outputs.get(call.key)) is None:
            return None
        kind, outputs = found
        made = [self._made(output, call.tensors) for output in outputs]
        return made[0] if kind is FakeTensor else kind(made)

    def remember(self, call: "Call", given: Any) -> None:
        """Where it depends on nothing else."""
        kind = type(given)
        outputs = [given] if kind is FakeTensor else given if kind in (tuple, list) else []
        known = all(type(one) is FakeTensor and one.constant is None and not one.dtype.is_complex for one in outputs)
        if not outputs or not known or not BY_VALUES.isdisjoint(call.func.tags):
            return
        described = [_described(one, call.tensors) for one in outputs]
        fresh = [one.untyped_storage()._cdata for one, how in zip(outputs, described, strict=True) if how.of is None]
        alike = all(self._is_like(one, how, call.tensors) for one, how in zip(outputs, described, strict=True))
        if alike and len(set(fresh)) == len(fresh):
            self._outputs[call.key] = kind, described

    def _made(self, output: Output, given: list[FakeTensor]) -> FakeTensor:
        if output.itself:
            return given[output.of]
        if output.of is None:
            made = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
        else:
            with in_kernel_invocation_manager(self.mode):
                made = torch.empty(0, dtype=output.dtype, device="meta")
                made.set_(given[output.of].untyped_storage(), output.offset, output.shape, output.stride)
        return FakeTensor(self.mode, made, output.device)

    def _is_like(self, tensor: FakeTensor, output: Output, given: list[FakeTensor]) -> bool:
        """What would be made in its place has the same memory, and the same is done with it."""
        made = self._made(output, given)
        memory = tensor.untyped_storage().nbytes() == made.untyped_storage().nbytes()
        return memory and torch._C._dispatch_keys(tensor) == torch._C._dispatch_keys(made)


class Call:
    """An operation and what it is given. `key`: all that its outputs depend on, None where nobody knows that."""

    def __init__(self, func: Any, args: Iterable[Any], kwargs: dict[str, Any] | None):
        self.func, self.tensors = func, []
        key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *(kwargs or ())]
        plain = isinstance(func, torch._ops.OpOverload) and self._describe(args, key)
        plain = plain and self._describe(kwargs.values() if kwargs else (), key)
        self.key = tuple(key) if plain and self.tensors else None

    def _describe(self, values: Iterable[Any], key: list[Any]) -> bool:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.dtype.is_complex or value.layout is not torch.strided:
                    return False
                if value.is_inference():
                    return False
                key += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
                key.append(value.requires_grad)
                self.tensors.append(value)
            elif kind in PLAIN:
                key += (kind, value)  # 1, 1.0 and True are not the same
            elif kind in LISTS:
                key += (kind, len(value))
                if not self._describe(value, key):
                    return False
            else:
                return False
        return True


def _described(tensor: FakeTensor, given: list[FakeTensor]) -> Output:
    memory = tensor.untyped_storage()._cdata
    of = next((i for i, one in enumerate(given) if one.untyped_storage()._cdata == memory), None)
    itself = of is not None and tensor is given[of]
    return Output(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device, of, itself)
