"""What LoRA on query, key and value costs an update, and ways to compute it together. Compiled, forward and backward.

    python -m benchmarks.adapters            # needs a GPU
    python -m benchmarks.adapters --small    # the same calls on a CPU: are they the same sums?

`none` has no LoRA; `apart` is PEFT's way, each projection by itself; `one A` multiplies the input with all three A at
once; `one W` has one product with all three weights beside that; `one product` has the adapters in that product, as
columns beside the weights. Figures are milliseconds for all three projections.
"""

import argparse
from collections.abc import Callable

import torch
from torch.nn.functional import linear

from benchmarks.timing import seconds

# rows, width, rank: SD3.5-medium with 44 rows of 1357 tokens, Qwen-Image with 8 of 1088
SIZES = {"SD3.5-medium": (44 * 1357, 1536, 32), "Qwen-Image": (8 * 1088, 3072, 64)}
SMALL = {"small": (96, 64, 4)}
Three = list[torch.Tensor]


def none(x: torch.Tensor, w: torch.Tensor, a: Three, b: Three) -> Three:
    return [linear(x, one) for one in w.chunk(3)]


def apart(x: torch.Tensor, w: torch.Tensor, a: Three, b: Three) -> Three:
    return [linear(x, one) + linear(linear(x, down), up) for one, down, up in zip(w.chunk(3), a, b, strict=True)]


def one_a(x: torch.Tensor, w: torch.Tensor, a: Three, b: Three) -> Three:
    inner = linear(x, torch.cat(a)).chunk(3, dim=-1)
    return [linear(x, one) + linear(low, up) for one, low, up in zip(w.chunk(3), inner, b, strict=True)]


def one_w(x: torch.Tensor, w: torch.Tensor, a: Three, b: Three) -> Three:
    return list((linear(x, w) + linear(linear(x, torch.cat(a)), torch.block_diag(*b))).chunk(3, dim=-1))


def one_product(x: torch.Tensor, w: torch.Tensor, a: Three, b: Three) -> Three:
    wide = torch.cat([x, linear(x, torch.cat(a))], dim=-1)
    return list(linear(wide, torch.cat([w, torch.block_diag(*b)], dim=1)).chunk(3, dim=-1))


WAYS: dict[str, Callable[..., Three]] = {
    "none": none, "apart": apart, "one A": one_a, "one W": one_w, "one product": one_product
}  # fmt: skip


def measure(way: str, size: tuple[int, int, int], device: str) -> tuple[float, torch.Tensor]:
    """(milliseconds, the gradient of the input)."""
    rows, width, rank = size
    torch.manual_seed(0)
    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    x, given = (torch.randn(rows, width, device=device).to(dtype) for _ in range(2))
    w = (torch.randn(3 * width, width, device=device) / width**0.5).to(dtype)
    a = [(torch.randn(rank, width, device=device) / width**0.5).requires_grad_() for _ in range(3)]
    b = [(torch.randn(width, rank, device=device) / 10).requires_grad_() for _ in range(3)]
    x.requires_grad_()

    def run(x: torch.Tensor) -> torch.Tensor:
        """With a norm before, and after it, in whose kernels what lies between products can be."""
        normed = torch.nn.functional.layer_norm(x, (width,))
        with torch.autocast(device, dtype, enabled=on_gpu):
            return sum(torch.nn.functional.rms_norm(one, (width,)) for one in WAYS[way](normed, w, a, b))

    torch.compiler.reset()  # too many ways of one function are not compiled
    called = torch.compile(run, dynamic=False) if on_gpu else run

    def step() -> torch.Tensor:
        trained = [x, *(a + b if way != "none" else [])]
        return torch.autograd.grad(called(x), trained, given)[0]

    return 1e3 * seconds(step, device), step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one small size, on a CPU")
    options = parser.parse_args()
    device, sizes = ("cpu", SMALL) if options.small else ("cuda", SIZES)
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: take --small")
    print(f"| size | {' | '.join(WAYS)} | gradients differ by |\n|---|{'---|' * (len(WAYS) + 1)}")
    for name, size in sizes.items():
        found = {way: measure(way, size, device) for way in WAYS}
        own = found["apart"][1].float()
        others = (gradient.float() for way, (_, gradient) in found.items() if way != "none")
        far = max((other - own).abs().max() / own.abs().max() for other in others)
        print(f"| {name} | {' | '.join(f'{ms:.2f}' for ms, _ in found.values())} | {far:.1e} |", flush=True)


if __name__ == "__main__":
    main()
