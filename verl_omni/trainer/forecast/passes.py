"""Memory and arithmetic of a forward and of its gradient, from the real module on a pretended GPU.

A model runs with one block of each kind, and once more with two of one kind: what that adds is what each further block
adds. The same is done with two and with three rows. So a model of any depth, with any micro-batch, is a sum.

Of a compiled block, what lies between forward and backward is what inductor's own partitioner leaves there. What a
backward needs beside that is taken from the block as it is written. What a memory budget leaves there is no sum of
rows: it depends on how large activations are beside weights.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from verl_omni.perf.live_bytes import LiveBytes, PretendedGpu
from verl_omni.trainer.forecast.partitioned import Partitioned, import_compiler
from verl_omni.trainer.forecast.remembered import Remembered
from verl_omni.utils.forks import in_forks
from verl_omni.workers.engine.compile.blocks import repeated_blocks

FEW_ROWS = (2, 3)
Kinds = dict[tuple, list[tuple[torch.nn.ModuleList, str]]]
Inputs = Callable[[int], dict[str, Any]]
Forward = Callable[[torch.nn.Module, dict[str, Any]], torch.Tensor]


@dataclass(frozen=True)
class Pass:
    """`kept`: bytes that lie between forward and backward, of which `block` are the largest block's. `extra`: what the
    worst moment has beside them. FLOPs."""

    kept: float = 0.0
    extra: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    block: float = 0.0

    def with_blocks(self, more: "Pass", less: "Pass", times: int) -> "Pass":
        """So many blocks more, each of which adds what `more` has beside `less`."""
        return Pass(
            self.kept + times * (more.kept - less.kept),
            max(self.extra, more.extra),
            self.forward + times * (more.forward - less.forward),
            self.backward + times * (more.backward - less.backward),
            max(self.block, more.kept - less.kept),
        )


class Passes:
    """Of one transformer on a device, of which two blocks of each kind are left. `inputs(rows)` are its arguments."""

    def __init__(
        self,
        part: torch.nn.Module,
        inputs: Inputs,
        forward: Forward,
        dtype: torch.dtype,
        gpu: PretendedGpu,
    ):
        self.part, self.inputs, self.call, self.dtype, self.gpu = part, inputs, forward, dtype, gpu
        self.kinds = kinds_of_blocks(part)
        for holder, name in (place for blocks in self.kinds.values() for place in blocks[2:]):
            del holder._modules[name]
        with self.gpu.here():
            part.to_empty(device=gpu.device).train()

    def whole(self, rows: int, **how: Any) -> Pass:
        """Of a micro-batch of so many, all blocks. Of compiled ones without a budget only what they keep is known."""
        ones, compiled, budget = dict.fromkeys(self.kinds, 1), how.get("compiled", False), how.get("budget")
        self.make_tables(rows)
        with Partitioned(self.kinds, budget) if compiled else contextlib.nullcontext():
            if compiled:  # graphs are traced in half the time where nobody counts
                self._run_uncounted(rows, gradient=True)
            least = whole = self._run(ones, rows, **how)
            for kind, blocks in self.kinds.items():
                if len(blocks) > 1:
                    more = self._run(ones | {kind: 2}, rows, **how)
                    whole = whole.with_blocks(more, least, len(blocks) - 1)
        return Pass(kept=whole.kept, block=whole.block) if compiled and budget is None else whole

    @functools.cache  # noqa: B019
    def make_tables(self, rows: int) -> None:
        """Those that a model makes once are no part of a block."""
        self._run_uncounted(rows, gradient=False)

    def _run_uncounted(self, rows: int, gradient: bool) -> None:
        self.part.disable_gradient_checkpointing()
        given = self._given(rows)
        with self.gpu.here(), shortened(self.kinds, dict.fromkeys(self.kinds, 1)):
            with torch.set_grad_enabled(gradient), self.gpu.autocast(self.dtype):
                self.call(self.part, given)

    def _run(
        self,
        counts: dict[tuple, int],
        rows: int,
        gradient: bool,
        checkpointing: bool = False,
        compiled: bool = False,
        budget: float | None = None,
    ) -> Pass:
        """Of compiled blocks the backward is counted where there is a budget."""
        (self.part.enable_gradient_checkpointing if checkpointing else self.part.disable_gradient_checkpointing)()
        given = self._given(rows)
        with self.gpu.here(), shortened(self.kinds, counts):
            with LiveBytes() as live, gradients_apart(self.part, live):
                with torch.set_grad_enabled(gradient), self.gpu.autocast(self.dtype):
                    output = self.call(self.part, given).float()
                kept, forward = live.now, live.flops
                if gradient and (budget or not compiled):
                    output.sum().backward()
                return Pass(kept, live.most - kept, forward, live.flops - forward)

    def _given(self, rows: int) -> dict[str, Any]:
        return tree_map_only(torch.Tensor, self.gpu.like, self.inputs(rows))


class Lines:
    """Passes of any number of rows, from those of a few. `passes()` makes what measures, where something is unknown."""

    def __init__(self, passes: Callable[[], Passes], known: Remembered):
        self._passes, self._known = passes, known

    def forward(self, rows: float) -> Pass:
        """Without a gradient."""
        return self._line(rows, gradient=False)

    def training(self, rows: float, checkpointing: bool, compiled: bool, budget: float = 1.0) -> Pass:
        """With its gradient. `budget`: as `actor.engine` has it, of compiled blocks without checkpointing."""
        needed = [{}, {"checkpointing": True}] if checkpointing else [{}]
        within = compiled and budget < 1 and not checkpointing
        needed += [{"compiled": True}] if compiled and not within else []
        self._measure(*({"gradient": True} | how for how in needed))
        written = self._line(rows, gradient=True)
        if within:
            return self._within(budget, round(rows), written)
        found = self._line(rows, gradient=True, checkpointing=True) if checkpointing else written
        if not compiled:
            return found
        partitioned = self._line(rows, gradient=True, compiled=True)
        if not checkpointing:
            return dataclasses.replace(found, kept=partitioned.kept, block=partitioned.block)
        return dataclasses.replace(found, extra=partitioned.block + written.extra)

    def parted(self, rows: int, *budgets: float) -> list[Pass]:
        """Of compiled blocks within each of these budgets, with just as many rows: what is kept, and FLOPs."""
        hows = [{"gradient": True, "compiled": True, "budget": budget} for budget in budgets]
        self._measure(*hows, with_rows=(rows,))
        return [Pass(*self._known[_name(rows, how)]) for how in hows]

    def _within(self, budget: float, rows: int, written: Pass) -> Pass:
        """While a block is at work, what it did not keep may be there again, all of it."""
        everything, within = self.parted(rows, 1.0, budget)
        return dataclasses.replace(
            written,
            kept=within.kept,
            block=within.block,
            extra=written.extra + everything.block - within.block,
            backward=written.backward + within.backward - everything.backward,
        )

    def _line(self, rows: float, **how: bool) -> Pass:
        self._measure(how)
        few, more = (Pass(*self._known[_name(count, how)]) for count in FEW_ROWS)
        steps = (rows - FEW_ROWS[0]) / (FEW_ROWS[1] - FEW_ROWS[0])
        figures = ((getattr(few, f.name), getattr(more, f.name)) for f in dataclasses.fields(Pass))
        return Pass(*(max(0.0, low + steps * (high - low)) for low, high in figures))

    def _measure(self, *hows: dict[str, Any], with_rows: tuple[int, ...] = FEW_ROWS) -> None:
        """Each with a few rows, all at once: tracing takes seconds, in one thread."""
        wanted = {_name(rows, how): (rows, how) for how in hows for rows in with_rows}
        missing = {name: asked for name, asked in wanted.items() if name not in self._known}
        if missing:
            passes = self._passes()
            for rows in with_rows:
                passes.make_tables(rows)  # before there are copies of this process, each of which would
            if any(how.get("compiled") for _, how in missing.values()):
                import_compiler()
            found = in_forks([functools.partial(passes.whole, rows, **how) for rows, how in missing.values()])
            self._known.add({name: list(dataclasses.astuple(one)) for name, one in zip(missing, found, strict=True)})


def _name(rows: int, how: dict[str, Any]) -> str:
    return json.dumps([rows, sorted(how.items())])


def kinds_of_blocks(part: torch.nn.Module) -> Kinds:
    """Blocks of one list whose weights have the same shapes, and where each of them is held."""
    blocks, kinds = {id(block) for block in repeated_blocks(part)}, {}
    for path, holder in part.named_modules():
        if isinstance(holder, torch.nn.ModuleList):
            for name, block in holder.named_children():
                if id(block) in blocks:
                    shapes = tuple((n, tuple(p.shape), p.requires_grad) for n, p in block.named_parameters())
                    kinds.setdefault((path, shapes), []).append((holder, name))
    return kinds


@contextlib.contextmanager
def shortened(kinds: Kinds, counts: dict[tuple, int]) -> Iterator[None]:
    """Inside, the model has so many blocks of each kind, in their order."""
    kept: dict[int, tuple[torch.nn.ModuleList, set[str]]] = {}
    for kind, blocks in kinds.items():
        for holder, name in blocks[: counts[kind]]:
            kept.setdefault(id(holder), (holder, set()))[1].add(name)
    before = [(holder, dict(holder._modules)) for holder, _ in kept.values()]
    try:
        for holder, names in kept.values():
            chosen = [block for name, block in holder._modules.items() if name in names]
            holder._modules = {str(i): block for i, block in enumerate(chosen)}
        yield
    finally:
        for holder, modules in before:
            holder._modules = modules


@contextlib.contextmanager
def gradients_apart(part: torch.nn.Module, live: LiveBytes) -> Iterator[None]:
    """A parameter's gradient is not counted once it lies there: how much they are together is known."""
    trained = [p for p in part.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(lambda p: live.forget(p.grad)) for p in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trained:
            parameter.grad = None
