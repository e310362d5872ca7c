"""Compile the update's graphs in other processes, while this one compiles and runs the first rollout.

torch.compile works in one thread, and graphs with their gradients are the longest work it has. Here each kind of block
goes to a process of its own, which runs it once at the update's size. That leaves its kernels in the cache on disk,
where this process finds them when the update begins.
"""

import contextlib
import copy
import inspect
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from verl_omni.workers.engine.fsdp.parallel import (
    choose_cache,
    compiled_by_mode,
    repeated_blocks,
    start_compilers,
    streams,
)


@dataclass
class Input:
    """A tensor of a call, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def make(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)


@dataclass
class Job:
    """A block without its weights, and a call of it."""

    block: torch.nn.Module
    kwargs: dict[str, Any]
    device: torch.device
    autocast: torch.dtype | None


class CompileAhead:
    """One kind of block. Its first call without a gradient starts the work, its first call with one waits for it."""

    def __init__(
        self, block: torch.nn.Module, rows: Callable[[], int], autocast: torch.dtype | None, others: bool, threads: int
    ):
        self.rows, self.autocast, self.others = rows, autocast, others
        self.skeleton = skeleton(block)
        self.streams = streams(block)
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        # It imports all that compiling needs before its work arrives. Without work, the closed pipe ends it.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)},
        )
        self.sent: threading.Thread | None = None
        self.hook = block.register_forward_pre_hook(self._called, with_kwargs=True)

    def _called(self, block: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.hook.remove()
            self._wait()
        elif self.sent is None:
            given = inspect.signature(type(block).forward).bind(block, *args, **kwargs).arguments
            given.pop("self")
            job = Job(self.skeleton, self._as_in_the_update(given), given["hidden_states"].device, self.autocast)
            self.sent = threading.Thread(target=self._send, args=(pickle.dumps(job),), daemon=True)
            self.sent.start()

    def _as_in_the_update(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call with the update's number of rows, and with its gradients."""
        rows = len(kwargs["hidden_states"])

        def described(name: str, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                batched = value.ndim > 0 and len(value) == rows
                shape = (self.rows(), *value.shape[1:]) if batched else tuple(value.shape)
                trained = batched and value.is_floating_point() and (self.others or name in self.streams)
                return Input(shape, value.dtype, trained)
            if isinstance(value, list | tuple):
                return type(value)(described(name, v) for v in value)
            return value

        return {name: described(name, value) for name, value in kwargs.items()}

    def _send(self, job: bytes) -> None:
        self.errors = self.process.communicate(job)[1]

    def _wait(self) -> None:
        if self.sent is None:
            self.process.kill()
            return
        self.sent.join()
        if self.process.returncode:
            reason = self.errors.decode().strip().splitlines()[-1:]
            warnings.warn(f"compiling ahead failed, so this takes longer: {' '.join(reason)}", stacklevel=2)


def compile_ahead(
    parts: Iterable[torch.nn.Module], rows: Callable[[], int], autocast: torch.dtype | None
) -> list[CompileAhead]:
    """One for each kind of block (by the shapes of its weights). Call before the blocks are compiled or patched."""
    found: dict[tuple, torch.nn.Module] = {}
    others = False  # whether anything outside of the blocks is trained, so that all of their inputs have a gradient
    for part in parts:
        blocks = repeated_blocks(part)
        inside = {id(p) for block in blocks for p in block.parameters()}
        others |= any(p.requires_grad and id(p) not in inside for p in part.parameters())
        for block in blocks:
            kind = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters())
            found.setdefault(kind, block)
    choose_cache()
    threads = max(1, (os.cpu_count() or 1) // (len(found) + 1))
    return [CompileAhead(block, rows, autocast, others, threads) for block in found.values()]


def skeleton(block: torch.nn.Module) -> torch.nn.Module:
    """A copy on the meta device."""
    empty: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in block.parameters()
    }
    return copy.deepcopy(block, empty | {id(b): b.to("meta") for b in block.buffers()})


def run(job: Job) -> None:
    """Forward and backward, once."""

    def made(value: Any) -> Any:
        if isinstance(value, Input):
            return value.make(job.device)
        return type(value)(made(v) for v in value) if isinstance(value, list | tuple) else value

    block = job.block.to_empty(device=job.device).train()
    kwargs = {name: made(value) for name, value in job.kwargs.items()}
    mixed = torch.autocast(job.device.type, job.autocast) if job.autocast else contextlib.nullcontext()
    with mixed:
        outputs = compiled_by_mode(block, "inductor")(**kwargs)
    outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o is not None and o.requires_grad]
    torch.autograd.backward(outputs, [torch.zeros_like(o) for o in outputs])


def main() -> None:
    import diffusers.loaders.peft  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401

    start_compilers()
    with contextlib.suppress(EOFError):  # the run ended before there was any work
        run(pickle.load(sys.stdin.buffer))
