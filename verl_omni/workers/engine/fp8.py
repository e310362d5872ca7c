"""Linear layers of the transformer blocks in 8 bits (e4m3), for passes that need no gradient.

Each row of the activations and of the weights has a scale of its own, with which its largest value is the largest that
8 bits can hold. Activations are quantised as they come, in plain torch: a compiler puts that into the operation before
(norm, modulation, activation). Weights are quantised once, after they have changed. Attention is left as it is. On a
GPU the tensor cores multiply; on a CPU the same numbers are multiplied in float32.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from types import MethodType

import torch

from verl_omni.workers.engine.compile.blocks import repeated_blocks
from verl_omni.workers.engine.eight_bits import weight_of

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
MULTIPLE = 16  # of inputs and of outputs: what the tensor cores take
CAPABILITY = (8, 9)  # Ada and Hopper: the first that have them


def refuse_old_gpu(device: torch.device | str) -> None:
    if torch.device(device).type != "cuda" or torch.cuda.get_device_capability(device) >= CAPABILITY:
        return
    found = ".".join(map(str, torch.cuda.get_device_capability(device)))
    raise ValueError(
        f"precision=fp8 needs a GPU of compute capability 8.9 or newer (L4, L40S, H100, H200, B200), and "
        f"{torch.cuda.get_device_name(device)} has {found}: leave rollout.precision, ref.precision and "
        "rollout.pool.precision out"
    )


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3, float32 scales (..., 1)) of rows (..., K); a row of zeros stays one.

    The largest value becomes LARGEST but for rounding in float32, which 8 bits do not see: nothing has to be clamped.
    """
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    return (rows * (LARGEST / largest)).to(E4M3), largest / LARGEST


def product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x (..., K) times a quantised weight (N, K) with scales (N, 1), plus bias, in `dtype`."""
    rows, row_scale = quantised(x.flatten(0, -2))
    if rows.is_cuda:
        bias = None if bias is None else bias.to(torch.bfloat16)
        found = torch._scaled_mm(
            rows, weight.t(), row_scale, scale.t(), bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
        ).to(dtype)
    else:
        with torch.autocast("cpu", enabled=False):
            found = (rows.float() @ weight.float().t()) * row_scale * scale.t()
            found = (found if bias is None else found + bias.float()).to(dtype)
    return found.unflatten(0, x.shape[:-1])


def _forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return product(x, self.fp8_weight, self.fp8_scale, self.bias, self.fp8_dtype)


class Fp8Layers:
    """The layers of some modules that can be computed in 8 bits, and what is held of them for that.

    `modules` are the ends of their names within a block, as LoRA's target modules are. Layers whose sides are no
    multiples of 16 are left as they are.
    """

    def __init__(
        self, parts: Iterable[torch.nn.Module], modules: Sequence[str], device: torch.device, dtype: torch.dtype
    ):
        refuse_old_gpu(device)
        self.dtype = dtype
        self.blocks = [block for part in parts for block in repeated_blocks(part)]
        self.layers = layers_of(self.blocks, modules)
        self._adapted = [(linear, wrapped) for linear, wrapped in self.layers if wrapped is not None]
        self._folded = False

    @property
    def linears(self) -> set[torch.nn.Linear]:
        return {linear for linear, _ in self.layers}

    @torch.no_grad()
    def hold(self, fold: bool) -> None:
        """Quantise the weights as they are now; with `fold`, what LoRA adds to each among them, in float32."""
        for linear, wrapped in self.layers:
            weight = weight_of(linear)
            if fold and wrapped is not None:
                weight = weight + wrapped.get_delta_weight("default").float()
            linear.fp8_weight, linear.fp8_scale = quantised(weight)
            linear.fp8_dtype = self.dtype
        self._folded = fold

    def drop(self) -> None:
        """Give the memory back."""
        for linear, _ in self.layers:
            for name in ("fp8_weight", "fp8_scale", "fp8_dtype"):
                vars(linear).pop(name, None)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Forwards inside use what is held."""
        before = [wrapped._disable_adapters for _, wrapped in self._adapted]
        for block in self.blocks:
            block.in_fp8 = True
        for linear, _ in self.layers:
            linear.forward = MethodType(_forward, linear)
        for _, wrapped in self._adapted if self._folded else ():
            wrapped._disable_adapters = True
        try:
            yield
        finally:
            for block in self.blocks:
                del block.in_fp8
            for linear, _ in self.layers:
                del linear.forward
            for (_, wrapped), off in zip(self._adapted, before, strict=True):
                wrapped._disable_adapters = off

    @contextlib.contextmanager
    def held(self, fold: bool) -> Iterator[None]:
        """Quantised and used inside, and nowhere else."""
        self.hold(fold)
        try:
            with self.active():
                yield
        finally:
            self.drop()


def layers_of(
    blocks: Sequence[torch.nn.Module], modules: Sequence[str]
) -> list[tuple[torch.nn.Linear, torch.nn.Module | None]]:
    """The chosen layers of all blocks; an error where a name is that of none, or nothing can be done in 8 bits."""
    names = {name for block in blocks for name, _ in linears(block)}
    if not names:
        raise ValueError(
            "precision=fp8 is for the linear layers of a transformer's blocks, and of this model diffusers names no "
            "blocks (_repeated_blocks, _no_split_modules): leave it out"
        )
    for module in modules:
        if not any(is_called(name, module) for name in names):
            raise ValueError(
                f"no linear layer of the transformer's blocks is called {module}: name those that are to be "
                f"computed in 8 bits in actor_rollout_ref.actor.engine.fp8_modules, such as {min(names)}"
            )
    layers = [layer for block in blocks for layer in chosen_layers(block, modules)]
    if not layers:
        raise ValueError(
            f"precision=fp8 is for layers whose sides are multiples of {MULTIPLE}, and none of this model's are: "
            "leave it out"
        )
    return layers


def chosen_layers(
    block: torch.nn.Module, modules: Sequence[str]
) -> list[tuple[torch.nn.Linear, torch.nn.Module | None]]:
    """(the linear layer, the LoRA around it or None) for each that is named and has the sides for it."""
    found = []
    for name, linear in linears(block):
        fits = linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0
        if fits and any(is_called(name, module) for module in modules):
            around = block.get_submodule(name)
            found.append((linear, None if around is linear else around))
    return found


def linears(block: torch.nn.Module) -> list[tuple[str, torch.nn.Linear]]:
    """The block's own, by the names that they have without a LoRA around them."""
    own = [(name, m) for name, m in block.named_modules() if isinstance(m, torch.nn.Linear) and ".lora_" not in name]
    return [(name.removesuffix(".base_layer"), linear) for name, linear in own]


def is_called(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")
