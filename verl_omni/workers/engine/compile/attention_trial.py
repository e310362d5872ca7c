"""Which attention kernel is right here, and fastest: tried once at start-up, with a run's own shapes.

A kernel may be wrong for a shape, be missing, or end its process with an illegal memory access: so it is tried in
another one. Each is compared, forward and backward, with the plain formula in float32.
"""

import json
import math
import subprocess
import sys
from dataclasses import dataclass

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers.engine.compile import attention_kernels
from verl_omni.workers.engine.compile.attention_kernels import NATIVE

# Not flash, which takes no mask, as prompts of two lengths need one: an adapter that passes none names it itself.
KERNELS = (NATIVE, "_native_cudnn", "_native_efficient")
MOST_TOKENS = 2**14  # of all rows of the trial
ALLOWED = 0.02  # of the largest value of a result, in 16 bits
GAIN = 0.97  # of the time of torch's own choice: less gained is less than the next measurement differs by
MOST_SECONDS = 120


@dataclass(frozen=True)
class Shape:
    rows: int
    tokens: int
    heads: int
    width: int  # of a head

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens} tokens, {self.heads} heads of {self.width}"


@dataclass(frozen=True)
class Tried:
    """A kernel: how far off (of the largest value), milliseconds forward and backward, or why it is none."""

    kernel: str
    off: float = math.inf
    ms: float = math.inf
    failed: str | None = None

    @property
    def passes(self) -> bool:
        return self.failed is None and self.off <= ALLOWED

    def __str__(self) -> str:
        if self.passes:
            return f"{self.kernel} {self.ms:.2f} ms"
        return f"{self.kernel}: {self.failed or f'off by {self.off:.1%}'}"


def shape_of(model_config: DiffusionModelConfig, adapter: type[DiffusionModelBase]) -> Shape | None:
    """Of the attention of a sample; None where the transformer's config does not say."""
    config = adapter.transformer_config(model_config)
    heads = config.get("num_attention_heads") or config.get("n_heads")
    width = config.get("attention_head_dim") or (config["dim"] // heads if heads and "dim" in config else None)
    if not heads or not width:
        return None
    text = model_config.pipeline.max_sequence_length or 0
    tokens = adapter.tokens(model_config) + (text if "joint_attention_dim" in config else 0)
    return Shape(max(1, min(16, MOST_TOKENS // tokens)), tokens, heads, width)


def best_attention(shape: Shape, device: str, dtype: torch.dtype) -> tuple[str | None, str]:
    """(the backend, why). None leaves it to torch, whose own choice is taken unless another is clearly faster."""
    found = try_kernels(shape, device, dtype)
    good = [one for one in found if one.passes]
    said = f"tried with {shape}: {', '.join(map(str, found))}"
    if not good:
        raise RuntimeError(f"no attention kernel gives what the plain formula gives: {said}")
    own = next((one for one in good if one.kernel == NATIVE), None)
    fastest = min(good, key=lambda one: one.ms)
    chosen = own if own is not None and fastest.ms > GAIN * own.ms else fastest
    return (None if chosen.kernel == NATIVE else chosen.kernel), said


def try_kernels(shape: Shape, device: str, dtype: torch.dtype, kernels: tuple[str, ...] = KERNELS) -> list[Tried]:
    """One after the other in another process; whoever ends it is out, and the rest go on in a new one."""
    left, found = list(kernels), []
    while left:
        size = [shape.rows, shape.tokens, shape.heads, shape.width]
        work = json.dumps([size, device, str(dtype).removeprefix("torch."), left])
        command = [sys.executable, attention_kernels.__file__, work]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired as late:
            said, end = (late.stdout or b"").decode(), f"took more than {MOST_SECONDS} s"
        else:
            *_, last = ["", *done.stderr.strip().splitlines()]
            said, end = done.stdout, f"ended its process ({last[:200] or f'exit code {done.returncode}'})"
        here = [Tried(**json.loads(line)) for line in said.splitlines() if line.startswith("{")]
        if len(here) < len(left):
            here.append(Tried(left[len(here)], failed=end))
        found, left = found + here, left[len(here) :]
    return found
