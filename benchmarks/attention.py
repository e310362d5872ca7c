"""Attention kernels side by side on one GPU, with the shapes of a training step: how long, and how far off.

    python -m benchmarks.attention            # needs a GPU; flash_4 needs the package flash-attn-4
    python -m benchmarks.attention --small    # one small shape, on a CPU

Each kernel has a process of its own. Forward alone, as in a rollout, and with its gradient, as in an update; a kernel
is off by the largest distance from the plain formula in float32, of the largest value.
"""

import argparse
import json
import subprocess
import sys

import torch

from benchmarks.timing import seconds
from verl_omni.workers.engine.compile.attention_kernels import FLASH_4, NATIVE, only, try_one

# rows, tokens, heads, width of a head
SHAPES = {
    "SD3.5-medium, image and text": (44, 1357, 24, 64),
    "SD3.5-medium, image": (44, 1024, 24, 64),
    "Qwen-Image": (8, 1088, 24, 128),
    "FLUX.1-dev": (4, 1536, 24, 128),
    "Wan2.1 1.3B, 17 frames": (4, 5120, 12, 128),
    "Wan2.2 A14B, 33 frames of 480 x 832": (1, 14040, 40, 128),
}
SMALL = {"small": (2, 300, 2, 16)}
KERNELS = (NATIVE, "_native_cudnn", "_native_flash", FLASH_4)


def measure(kernel: str, size: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> dict[str, float | str]:
    """Milliseconds and TFLOP/s, and how far off."""
    found = try_one(kernel, size, device, dtype)
    if "failed" in found:
        return found
    rows, tokens, heads, width = size
    inputs = [torch.randn(size, device=device).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    given = torch.randn(size, device=device).to(dtype).transpose(1, 2)
    attend = torch.nn.functional.scaled_dot_product_attention
    flops = 4 * rows * heads * tokens**2 * width  # of a forward; its gradient has two and a half times as many

    def both() -> None:
        torch.autograd.grad(attend(*inputs), inputs, given)

    with only(kernel):
        with torch.no_grad():
            forward = 1e3 * seconds(lambda: attend(*inputs), device)
        whole = 1e3 * seconds(both, device)
    return found | {
        "forward": forward, "both": whole, "forward rate": flops / forward / 1e9, "both rate": 3.5 * flops / whole / 1e9
    }  # fmt: skip


def in_another_process(kernel: str, shapes: list[str], small: bool) -> dict[str, dict[str, float | str]]:
    """Shape -> figures, or why there are none. What ends the process ends its shape; the others go on in a new one."""
    found: dict[str, dict[str, float | str]] = {}
    while left := [shape for shape in shapes if shape not in found]:
        command = [sys.executable, "-m", "benchmarks.attention", *["--small"] * small, "--one", kernel, *left]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found |= {shape: json.loads(line) for shape, line in zip(left, lines, strict=False)}
        if len(lines) < len(left):
            found[left[len(lines)]] = {"failed": (done.stderr.strip().splitlines() or ["nothing was said"])[-1]}
    return found


def row(shape: str, kernel: str, found: dict[str, float | str]) -> str:
    cells = [found.get("failed", ""), "", "", "", ""]
    if "failed" not in found:
        forward, both = (f"{found[side]:.2f} | {found[f'{side} rate']:.0f}" for side in ("forward", "both"))
        cells = [forward, both, f"{found['off']:.1%}"]
    return f"| {shape} | {kernel} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one small shape, on a CPU")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device, shapes = ("cpu", SMALL) if options.small else ("cuda", SHAPES)
    if options.one:
        kernel, *names = options.one
        for name in names:
            print(json.dumps(measure(kernel, shapes[name], device, torch.bfloat16)), flush=True)
        return
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: take --small")
    print("| shape | kernel | forward, ms | TFLOP/s | with gradient, ms | TFLOP/s | off |")
    print("|---|---|---|---|---|---|---|")
    for kernel in KERNELS:
        for shape, found in in_another_process(kernel, list(shapes), options.small).items():
            print(row(shape, kernel, found), flush=True)


if __name__ == "__main__":
    main()
