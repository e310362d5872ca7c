"""Other policies than the one that is trained: the reference, an old policy, a moving average.

Each is a copy of the trained parameters only (sharded as they are, optionally in CPU memory) that is swapped in for a
while. With LoRA that is a few megabytes, and the reference is the model with its adapters off: no second model exists.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from verl.utils.device import get_torch_device

from verl_omni.workers.host_memory import host_copy, local


def shard_like(whole: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's share of a tensor, as the parameter is cut."""
    if not hasattr(parameter, "device_mesh"):
        return whole.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    mesh = parameter.device_mesh
    return distribute_tensor(whole.to(mesh.device_type), mesh, parameter.placements).to_local()


def policy_at(name: str, version: int) -> str:
    """A policy as it was after so many training steps."""
    return f"{name} after {version}"


class Policies:
    """`before_swap` is called before weights are exchanged: gathered copies of them would be stale."""

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        offload: bool = False,
        before_swap: Callable[[], None] = lambda: None,
    ):
        self.parameters = parameters
        self.offload = offload
        self.before_swap = before_swap
        self.copies: dict[str, dict[str, torch.Tensor]] = {}
        self.fixed: set[str] = set()  # copies of what the model's folder holds: no checkpoint has them
        self.drew: dict[str, dict[str, torch.Tensor]] = {}  # policies that samples on their way were drawn with

    def __contains__(self, name: str) -> bool:
        return name in self.copies

    def keep(self, name: str, offload: bool = False, fixed: bool = False) -> None:
        """Remember the weights as they are now under this name, in CPU memory if `offload` says so.

        `fixed`: they never change, and every start makes them again from the model's folder.
        """
        self.copies[name] = self._copy(offload)
        if fixed:
            self.fixed.add(name)

    @torch.no_grad()
    def keep_frozen(self, name: str, read: Mapping[str, Callable[[], torch.Tensor]], offload: bool = False) -> None:
        """Remember what is read, a whole tensor at a time, under this name, laid out as the trained weights are."""
        copied = host_copy if self.offload or offload else torch.clone
        self.copies[name] = {k: copied(shard_like(read[k]().to(p.dtype), p)) for k, p in self.parameters.items()}
        self.fixed.add(name)

    def remember(self, name: str, most: int) -> None:
        """The weights as they are now draw samples that will be learned from later; `most` such policies are kept."""
        self.drew.pop(name, None)
        self.drew = dict([*self.drew.items()][max(0, len(self.drew) - most + 1) :])  # before there is one more
        self.drew[name] = self._copy()

    @torch.no_grad()
    def _copy(self, offload: bool = False) -> dict[str, torch.Tensor]:
        copied = host_copy if self.offload or offload else torch.clone
        copies = {k: copied(local(p).detach()) for k, p in self.parameters.items()}
        get_torch_device().synchronize()
        return copies

    @torch.no_grad()
    def blend(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * current."""
        for key, parameter in self.parameters.items():
            held = self.copies[name][key]
            held.lerp_(local(parameter).to(held), 1.0 - decay)

    @contextlib.contextmanager
    def swapped_in(self, name: str) -> Iterator[None]:
        """The named weights are the model's inside this block."""
        self._swap(name)
        try:
            yield
        finally:
            self._swap(name)

    @torch.no_grad()
    def _swap(self, name: str) -> None:
        self.before_swap()
        for key, parameter in self.parameters.items():
            held, shard = (self.drew.get(name) or self.copies[name])[key], local(parameter)
            current = shard.detach().clone()
            shard.copy_(held, non_blocking=True)
            held.copy_(current, non_blocking=True)
        get_torch_device().synchronize()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a checkpoint has to hold."""
        return {name: copy for name, copy in self.copies.items() if name not in self.fixed}

    def load_state_dict(self, copies: dict[str, dict[str, torch.Tensor]]) -> None:
        for name, tensors in copies.items():
            for key, value in tensors.items():
                self.copies[name][key].copy_(value)
