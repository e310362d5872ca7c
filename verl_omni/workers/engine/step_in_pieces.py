"""A step of an optimizer whose state is on the host: that of some parameters at a time is on the device."""

from collections.abc import Iterable, Iterator

import torch

from verl_omni.workers.host_memory import HostMemory, bring_state, local

PIECE = 2**30  # bytes of parameters


def step_in_pieces(optimizer: torch.optim.Optimizer, host: HostMemory, device: torch.device) -> None:
    """Every number is moved there and back once, as if all went together."""
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = []
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            for piece in pieces(p for p in parameters if p.grad is not None):
                group["params"] = piece
                bring_state(optimizer, piece, device)
                optimizer.step()
                host.take_state(optimizer, piece)
            group["params"] = []
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters
    host.settle()


def pieces(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    piece: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if piece and size + local(parameter).nbytes > PIECE:
            yield piece
            piece, size = [], 0
        piece.append(parameter)
        size += local(parameter).nbytes
    if piece:
        yield piece
