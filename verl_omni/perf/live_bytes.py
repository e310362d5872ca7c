"""How much memory a computation has in use at its worst moment: counted as it runs, on a device that need not be there.

Tensors on a pretended GPU have shapes, dtypes and lifetimes, and no memory: the real module runs forward and backward,
autocast and autograd do what they do, and each storage counts from the operation that makes it until nobody holds it.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from verl_omni.perf.known_values import KnownValues

DEVICE_OF = torch.ops.prim.device.default
GRAIN = 512  # torch's allocator gives memory in multiples of this


class LiveBytes(TorchDispatchMode):
    """`now`: bytes of what operations inside have made and somebody still holds. `most`: of the worst moment so far.

    `flops`: their arithmetic, by torch's own formulas. (torch's counter also follows modules, by hooks in the graph
    that hold what a checkpoint has recomputed.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.flops = 0
        self._counted: dict[int, _Count] = {}  # by the address of the storage, for as long as it is one

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code runs as it would without somebody who counts."""
        return True

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is DEVICE_OF:
            return func(*args)
        for tensor in _tensors((args, list(kwargs.values()) if kwargs else ())):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._counted:
                _Count(self, storage, 0)  # somebody else's
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._counted and not func.is_view:  # a real tensor's view has its own
                _Count(self, storage, -(-storage.nbytes() // GRAIN) * GRAIN)
        return out

    def forget(self, tensor: torch.Tensor) -> None:
        """From now on it is counted by somebody else."""
        self._counted[tensor.untyped_storage()._cdata].drop()


class _Count:
    def __init__(self, live: LiveBytes, storage: torch.UntypedStorage, size: int):
        self.live, self.size, self.address = live, size, storage._cdata
        self.storage = weakref.ref(storage, self.gone)
        live._counted[self.address] = self
        live.now += size
        live.most = max(live.most, live.now)

    def drop(self) -> None:
        self.live.now -= self.size
        self.size = 0

    def gone(self, storage: weakref.ref) -> None:
        self.drop()
        del self.live._counted[self.address]


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Of an operation's arguments, which are no trees of anybody's own."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for one in tree:
            yield from _tensors(one)


class PretendedGpu:
    """Inside `with gpu.here():` tensors have no memory, and are computed with as on a GPU. What was made there may be
    used there again. They say that they are on the CPU: torch without CUDA does not even slice those of a GPU."""

    device = "cpu"

    def __init__(self) -> None:
        self._mode = KnownValues()
        self.like = self._mode.like

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        functions = {"scaled_dot_product_attention": _attention, "layer_norm": _layer_norm}
        with self._mode, mock.patch.multiple(torch.nn.functional, **functions):
            yield

    @classmethod
    def autocast(cls, dtype: torch.dtype) -> contextlib.AbstractContextManager:
        return torch.autocast(cls.device, dtype) if dtype != torch.float32 else contextlib.nullcontext()


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """One that never has the scores of all tokens at once, as those that torch chooses on a GPU. All keep the same."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[0]


def _layer_norm(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Under autocast in float32, which on a CPU it is not."""
    if torch.is_autocast_enabled("cpu"):
        input, weight, bias = (None if t is None else t.float() for t in (input, weight, bias))
    return torch.layer_norm(input, normalized_shape, weight, bias, eps, False)
