"""Compile the update's graphs in other processes, while this one compiles and runs the first rollout.

torch.compile works in one thread, and graphs with their gradients are the longest work it has. Here each kind of block
goes to a process of its own, which runs it once at the update's size. That leaves its kernels in the cache on disk,
where this process finds them when the update begins.
"""

import contextlib
import copy
import functools
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
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from verl_omni.utils.call_signature import argument_names, by_name
from verl_omni.workers.engine.compile.blocks import (
    choose_cache,
    compiled_by_mode,
    repeated_blocks,
    start_compilers,
    streams,
)
from verl_omni.workers.engine.compile.clock import clock

LIMIT = 900  # seconds; then the update compiles for itself
# Makes of a block one that is compiled as among several ranks.
Spread = Callable[[torch.nn.Module], None]


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
    spread: Spread | None = None
    budget: float = 1.0


class CompileAhead:
    """One kind of block. Its first call without a gradient starts the work, its first call with one waits for it."""

    def __init__(
        self,
        block: torch.nn.Module,
        rows: Callable[[], int],
        autocast: torch.dtype | None,
        others: bool,
        threads: int,
        spread: Spread | None = None,
        budget: float = 1.0,
    ):
        self.rows, self.autocast, self.others, self.spread, self.budget = rows, autocast, others, spread, budget
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
        self.failure: str | None = None
        self.hook = block.register_forward_pre_hook(self._called, with_kwargs=True)

    def _called(self, block: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.hook.remove()
            self._wait()
        elif self.sent is None:
            given = by_name(block, args, kwargs)
            sample = given[argument_names(block)[0]]
            call = self._as_in_the_update(given, len(sample))
            job = Job(self.skeleton, call, sample.device, self.autocast, self.spread, self.budget)
            self.sent = threading.Thread(target=self._send, args=(job,), daemon=True)
            self.sent.start()

    def _as_in_the_update(self, given: dict[str, Any], rows: int) -> dict[str, Any]:
        """The call of `rows` rows with the update's number of them, and with its gradients."""

        def described(name: str, tensor: torch.Tensor) -> Input:
            batched = tensor.ndim > 0 and len(tensor) == rows
            shape = (self.rows(), *tensor.shape[1:]) if batched else tuple(tensor.shape)
            trained = batched and tensor.is_floating_point() and (self.others or name in self.streams)
            return Input(shape, tensor.dtype, trained)

        return {k: tree_map_only(torch.Tensor, functools.partial(described, k), v) for k, v in given.items()}

    def _send(self, job: Job) -> None:
        try:
            blob = pickle.dumps(job)
        except Exception as error:  # a class that no other process can find
            self.failure = f"{type(error).__name__}: {error}"
            self._end()
            return
        try:
            said = self.process.communicate(blob, timeout=LIMIT)[1].decode()
        except subprocess.TimeoutExpired:
            self.failure = f"it took longer than {LIMIT} s"
            self._end()
            return
        if self.process.returncode:
            self.failure = " ".join(said.strip().splitlines()[-1:])

    def _wait(self) -> None:
        if self.sent is None:
            self._end()
            return
        with clock.running():
            self.sent.join()
        if self.failure is not None:
            warnings.warn(
                f"the update is compiled here, as compiling ahead failed: {self.failure} "
                "(actor_rollout_ref.actor.engine.compile_ahead=false does not try)",
                stacklevel=2,
            )

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()  # and not for its compilers, which have its pipe too
        for pipe in (self.process.stdin, self.process.stderr):
            pipe.close()


def compile_ahead(
    parts: Iterable[torch.nn.Module],
    rows: Callable[[], int],
    autocast: torch.dtype | None,
    spread: Spread | None = None,
    budget: float = 1.0,
) -> list[CompileAhead]:
    """One for each kind of block (by the shapes of its weights). Call before blocks are compiled, patched or spread."""
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
    return [CompileAhead(block, rows, autocast, others, threads, spread, budget) for block in found.values()]


def skeleton(block: torch.nn.Module) -> torch.nn.Module:
    """A copy on the meta device."""
    empty: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in block.parameters()
    }
    return copy.deepcopy(block, empty | {id(b): b.to("meta") for b in block.buffers()})


def run(job: Job, backend: str = "inductor") -> None:
    """Forward and backward, once."""
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    block = job.block.to_empty(device=job.device).train()
    kwargs = tree_map_only(Input, lambda tensor: tensor.make(job.device), job.kwargs)
    mixed = torch.autocast(job.device.type, job.autocast) if job.autocast else contextlib.nullcontext()
    block.forward = compiled_by_mode(block, backend, job.budget)
    if job.spread is not None:
        job.spread(block)
    with mixed:
        outputs = block(**kwargs)
    outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o is not None and o.requires_grad]
    torch.autograd.backward(outputs, [torch.zeros_like(o) for o in outputs])


def main() -> None:
    import diffusers.loaders.peft  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401

    start_compilers()
    try:
        with contextlib.suppress(EOFError):  # the run ended before there was any work
            run(pickle.load(sys.stdin.buffer))
    finally:
        if dist.is_initialized():  # what is left of it would speak after the error, or keep the process from ending
            dist.destroy_process_group()
