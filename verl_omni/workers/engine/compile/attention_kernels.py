"""torch's attention kernels, each against the plain formula: forward, backward, time. Run as a program by
`attention_trial.py`; nothing but torch is imported, which takes seconds enough.
"""

import contextlib
import json
import math
import sys
import time
from contextlib import AbstractContextManager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

NATIVE = "native"  # torch's own choice
FLASH_4 = "flash_4"
PACKAGE = "flash-attn-4==4.0.0b18"  # the last whose functions give back what torch 2.11 to 2.13 ask of them
TORCH_KERNELS = {
    "_native_cudnn": SDPBackend.CUDNN_ATTENTION,
    "_native_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "_native_flash": SDPBackend.FLASH_ATTENTION,
    FLASH_4: SDPBackend.FLASH_ATTENTION,
    "_native_math": SDPBackend.MATH,
}
QUERIES = 256  # whose scores the plain formula has at once
TIMED = 5


def activate_flash_4() -> None:
    """FlashAttention 4 computes from now on what torch's own flash kernel did, in all of this process."""
    try:
        torch.nn.attention.activate_flash_attention_impl("FA4")
    except ImportError as missing:
        raise ImportError(f'it needs FlashAttention 4 ({missing}): pip install "{PACKAGE}"') from missing


def only(kernel: str) -> AbstractContextManager:
    """torch may take no other inside; of `native` it chooses."""
    return contextlib.nullcontext() if kernel == NATIVE else sdpa_kernel(TORCH_KERNELS[kernel])


def try_one(kernel: str, size: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> dict[str, float | str]:
    """`size`: rows, tokens, heads, width of a head. How far off it is, of the largest value, and milliseconds."""
    torch.manual_seed(0)
    inputs = [torch.randn(size, device=device).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    given = torch.randn(size, device=device).to(dtype).transpose(1, 2)
    given[:, :, QUERIES:] = 0  # so that the plain formula needs no other queries, for any gradient

    def run() -> list[torch.Tensor]:
        output = torch.nn.functional.scaled_dot_product_attention(*inputs)
        return [output[:, :, :QUERIES].detach(), *torch.autograd.grad(output, inputs, given)]

    try:
        if kernel == FLASH_4:
            activate_flash_4()
        with only(kernel):
            results = run()
            _wait(device)
            began = time.perf_counter()
            for _ in range(TIMED):
                run()
            _wait(device)
            ms = (time.perf_counter() - began) / TIMED * 1000
    except (ImportError, RuntimeError) as error:
        return {"kernel": kernel, "failed": " ".join(str(error).split())[:100]}
    off = max(_off(one, other) for one, other in zip(results, plain(inputs, given), strict=True))
    return {"kernel": kernel, "off": off, "ms": ms}


def plain(inputs: list[torch.Tensor], given: torch.Tensor) -> list[torch.Tensor]:
    """The formula, row by row in float32: output and gradients for the first queries."""
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for row in range(len(given)):
        query, key, value = (tensor[row].detach().float().requires_grad_() for tensor in inputs)
        scores = query[:, :QUERIES] @ key.mT / math.sqrt(query.shape[-1])
        output = scores.softmax(-1) @ value
        gradients = torch.autograd.grad(output, (query, key, value), given[row, :, :QUERIES].float())
        for part, result in zip(parts, (output.detach(), *gradients), strict=True):
            part.append(result)
    return [torch.stack(part) for part in parts]


def _off(one: torch.Tensor, other: torch.Tensor) -> float:
    far = ((one.float() - other).abs().max() / other.abs().max()).item()
    return far if math.isfinite(far) else math.inf


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def main(size: list[int], device: str, dtype: str, kernels: list[str]) -> None:
    for kernel in kernels:
        print(json.dumps(try_one(kernel, tuple(size), device, getattr(torch, dtype))), flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
