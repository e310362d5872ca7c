"""Weights that leave the device for a while, and come back to it."""

import functools
from collections.abc import Hashable, Iterable, Mapping

import torch
from verl.utils.device import get_device_name, get_torch_device

import verl_omni.utils.cpu_platform  # noqa: F401  (verl asks for a platform when it is imported)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in CPU memory, pinned where there is a GPU. Nobody has waited for it yet."""
    place = torch.empty_like(tensor, device="cpu", pin_memory=get_device_name() != "cpu")
    return place.copy_(tensor, non_blocking=True)


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in CPU memory, pinned where there is a GPU, and ready to be read."""
    copies = {name: host_copy(tensor) for name, tensor in tensors.items()}
    get_torch_device().synchronize()
    return copies


class HostMemory:
    """A place in CPU memory for each tensor, pinned where there is a GPU, and kept for the next time.

    With new pageable memory each time, weights left an H200 at 1.2 GB/s. What is frozen is copied once.
    """

    def __init__(self):
        self._places: dict[Hashable, torch.Tensor] = {}
        self._pinned = Pinned()

    @torch.no_grad()
    def take(self, modules: Iterable[torch.nn.Module], overwritten: bool = False) -> None:
        """`overwritten`: others write into the weights, whether they have a gradient or not."""
        for module in modules:
            # as `module.to` does, which FSDP knows about
            module._apply(functools.partial(self._taken, overwritten=overwritten))
        self.settle()

    @torch.no_grad()
    def take_state(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], anew: bool = False
    ) -> None:
        """Of those. Nobody has waited for the copies yet (`settle`). `anew`: into other places than before."""
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if _is_large(value):
                    key = (id(parameter), name)
                    if anew:
                        self._places.pop(key, None)
                    if key not in self._places and value.device.type != "cpu" and value is local(value):
                        self._places[key] = self._pinned.like(value)
                    state[name] = self._place(key, value, changes=True)

    def _taken(self, tensor: torch.Tensor, overwritten: bool) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter):
            return self._place(id(tensor), tensor, changes=tensor.requires_grad or overwritten)
        return tensor.cpu()

    def _place(self, key: Hashable, tensor: torch.Tensor, changes: bool) -> torch.Tensor:
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = host_copy(tensor.detach())
        elif changes:
            local(place).copy_(local(tensor), non_blocking=True)
        return place

    @staticmethod
    def settle() -> None:
        """Wait for the copies, and leave the device's memory to others."""
        get_torch_device().synchronize()
        get_torch_device().empty_cache()


class Pinned:
    """Places in large blocks of pinned memory: torch rounds each piece that it pins up to a power of two.

    So the optimizer's state of a model with layers of 3072 x 12288 would take 1.8 times its size.
    """

    BLOCK, GRAIN = 2**30, 512

    def __init__(self, pin: bool = True):
        self.pin, self._block, self._used = pin, torch.empty(0, dtype=torch.uint8), 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        size = -(-tensor.nbytes // self.GRAIN) * self.GRAIN
        if self._used + size > len(self._block):
            self._block = torch.empty(max(self.BLOCK, size), dtype=torch.uint8, pin_memory=self.pin)
            self._used = 0
        place = self._block[self._used : self._used + tensor.nbytes].view(tensor.dtype)
        self._used += size
        return place.as_strided(tensor.shape, tensor.stride())


def bring(modules: Iterable[torch.nn.Module], device: torch.device) -> None:
    for module in modules:
        module.to(device, non_blocking=True)


def bring_state(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], device: torch.device
) -> None:
    """A count of steps too, where the optimizer reads it on the device: weights on the host had theirs made there."""
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    counted_there = {id(parameter) for group in groups for parameter in group["params"]}
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if _is_large(value) or (isinstance(value, torch.Tensor) and id(parameter) in counted_there):
                state[name] = value.to(device, non_blocking=True)


def _is_large(value: object) -> bool:
    """Not a count of steps, which is kept where the optimizer wants it."""
    return isinstance(value, torch.Tensor) and value.ndim > 0
