"""Frozen weights below a LoRA in 8 bits: linear layers of the transformer's blocks, whole numbers with a scale each 64.

W[i, j] is held as q[i, j] * s[i, j // 64], q from -127 to 127. Products are computed as they are without, with weights
that are made when a layer is used and forgotten after it. So training and rollout agree to the last bit, and what goes
through a layer backward is exact for the weights that it has.
"""

from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor

from verl_omni.workers.engine.compile.blocks import repeated_blocks
from verl_omni.workers.engine.lora import lora_layers

INT8 = "int8"
GROUP = 64  # weights of a row that share a scale
LARGEST = 127
Receivers = dict[torch.nn.Parameter, Callable[[torch.Tensor], None] | None]


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 (N, K), bfloat16 scales (N, K / 64)) of a weight (N, K), rounded for the scales as they are held."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / LARGEST).bfloat16()
    whole = (groups / scales.float()).nan_to_num(0.0).round().clamp(-LARGEST, LARGEST)  # of zeros: zeros
    return whole.to(torch.int8).flatten(-2), scales.squeeze(-1)


def restored(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded once: bfloat16 and float32 hold both factors exactly."""
    return (weight.unflatten(-1, (-1, GROUP)).to(dtype) * scales.to(dtype).unsqueeze(-1)).flatten(-2)


class _Product(torch.autograd.Function):
    """x W^T + b that keeps of W what is held in 8 bits."""

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.nn.functional.linear(x, restored(weight, scales, x.dtype), bias)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[1:3])

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        weight, scales = ctx.saved_tensors
        return gradient @ restored(weight, scales, gradient.dtype), None, None, None


class Linear8Bit(torch.nn.Linear):
    """A frozen layer whose weight is held so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return _Product.apply(x.to(dtype), self.weight, self.weight_scales, bias)


def weight_of(linear: torch.nn.Linear) -> torch.Tensor:
    """In full."""
    if isinstance(linear, Linear8Bit):
        return restored(linear.weight.detach(), linear.weight_scales.detach(), torch.float32)
    return linear.weight.detach().float()


def hold_in_8_bits(parts: Iterable[torch.nn.Module], dtype: torch.dtype) -> None:
    """From now on, or from when they are filled."""
    for linear in layers_for_8_bits(parts, dtype):
        _convert(linear)


def layers_for_8_bits(parts: Iterable[torch.nn.Module], dtype: torch.dtype) -> list[torch.nn.Linear]:
    """The blocks' linear layers, adapted ones and others. Those that are held in another dtype than the model stay as
    they are, as do those whose inputs are no multiple of 64."""
    parts = list(parts)
    adapters = {m for layer in lora_layers(parts) for m in layer.modules()}
    adapters -= {layer.get_base_layer() for layer in lora_layers(parts)}
    modules = {m: None for part in parts for block in repeated_blocks(part) for m in block.modules()}
    linears = [m for m in modules if type(m) is torch.nn.Linear and m not in adapters]  # no forward of its own
    found = [m for m in linears if m.in_features % GROUP == 0 and m.weight.dtype == dtype]
    if not found:
        raise ValueError(
            f"actor_rollout_ref.model.base_precision={INT8} is for layers whose inputs are multiples of {GROUP}, and "
            "none of this model's blocks are: leave it out"
        )
    return found


def _convert(linear: torch.nn.Linear) -> None:
    weight = linear.weight.detach()
    if weight.is_meta:
        whole = torch.empty_like(weight, dtype=torch.int8)
        scales = weight.new_empty(weight.shape[0], weight.shape[1] // GROUP, dtype=torch.bfloat16)
    else:
        whole, scales = quantised(weight)
    linear.weight = torch.nn.Parameter(whole, requires_grad=False)
    linear.weight_scales = torch.nn.Parameter(scales, requires_grad=False)
    linear.__class__ = Linear8Bit


def receivers(part: torch.nn.Module) -> Receivers:
    """What takes a weight as it is stored, for those that are held otherwise; None: comes with another."""
    found: Receivers = {}
    for layer in part.modules():
        if isinstance(layer, Linear8Bit) and layer.weight.is_meta:
            found |= {layer.weight: _receiver(layer), layer.weight_scales: None}
    return found


def _receiver(layer: Linear8Bit) -> Callable[[torch.Tensor], None]:
    def receive(rows: torch.Tensor) -> None:
        for own, value in zip((layer.weight, layer.weight_scales), quantised(rows), strict=True):
            (own.to_local() if isinstance(own, DTensor) else own).copy_(value)

    return receive
