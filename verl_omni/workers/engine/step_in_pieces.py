"""An optimizer whose state is on the host: that of some parameters at a time is on the device."""

from collections.abc import Callable, Iterable, Iterator

import torch

from verl_omni.workers.host_memory import HostMemory, bring_state, local

PIECE = 2**30  # bytes of parameters


def step_in_pieces(optimizer: torch.optim.Optimizer, host: HostMemory, device: torch.device) -> None:
    """Every number is moved there and back once, as if all went together."""

    def step(piece: list[torch.nn.Parameter]) -> None:
        bring_state(optimizer, piece, device)
        optimizer.step()
        host.take_state(optimizer, piece)

    _piece_by_piece(optimizer, lambda p: p.grad is not None, step)
    host.settle()


def make_state_in_pieces(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[torch.nn.Parameter],
    host: HostMemory,
    device: torch.device,
) -> None:
    """Of those, for a checkpoint to fill: by a step with gradients and a rate of 0, as torch makes that of all at once.

    What the optimizer had for them before lies where it was.
    """
    made = set(map(id, parameters))
    rates = [group["lr"] for group in optimizer.param_groups]

    def make(piece: list[torch.nn.Parameter]) -> None:
        for parameter in piece:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for parameter in piece:
            parameter.grad = None
        bring_state(optimizer, piece, device)  # that of weights on the host too: from there it goes to pinned memory
        host.take_state(optimizer, piece, anew=True)

    try:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        _piece_by_piece(optimizer, lambda p: id(p) in made, make)
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    host.settle()


def _piece_by_piece(
    optimizer: torch.optim.Optimizer,
    wanted: Callable[[torch.nn.Parameter], bool],
    do: Callable[[list[torch.nn.Parameter]], None],
) -> None:
    """Of the wanted parameters; the optimizer has no others meanwhile."""
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = []
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            for piece in pieces(filter(wanted, parameters)):
                group["params"] = piece
                do(piece)
            group["params"] = []
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


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
