"""Blocks that keep between forward and backward what they keep when they are compiled."""

import contextlib
import functools
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from verl_omni.utils.call_signature import by_name
from verl_omni.workers.engine.compile.blocks import streams


class Partitioned:
    """While it lasts, the first two blocks of each kind run as AOTAutograd's graphs, parted as inductor parts them.

    One graph serves all blocks of a kind: it is told their weights. `budget`: as `actor.engine` has it.
    """

    def __init__(self, kinds: dict[tuple, list[tuple[torch.nn.ModuleList, str]]], budget: float = 1.0):
        self.kinds, self.budget, self._before = kinds, budget, contextlib.ExitStack()

    def __enter__(self) -> "Partitioned":
        for blocks in self.kinds.values():
            graph = functools.partial(_graph, {}, _partitioner(self.budget))
            for holder, name in blocks[:2]:
                block = holder._modules[name]
                block.forward = functools.partial(_call, block, graph)
                self._before.callback(block.__dict__.pop, "forward")
        return self

    def __exit__(self, *error: object) -> None:
        self._before.close()


def _call(block: torch.nn.Module, graph: Any, *args: Any, **kwargs: Any) -> Any:
    passed_on = streams(block)
    given = by_name(block, args, kwargs)
    args, kwargs = (), {name: _trained(value) if name in passed_on else value for name, value in given.items()}
    leaves, tree = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    names, weights = zip(*block.named_parameters(), strict=True)

    def function(weights: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        args, kwargs = tree_unflatten(given, tree)
        patched = block.__dict__.pop("forward")
        try:
            return torch.func.functional_call(block, dict(zip(names, weights, strict=True)), args, kwargs)
        finally:
            block.forward = patched

    tensors = [leaves[place] for place in places]
    shapes = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
    return graph(shapes, function)(list(weights), tensors)


def _trained(value: Any) -> Any:
    """As the engine gives it to the first block too: under LoRA it has no gradient there, and one graph serves all."""
    lacks = isinstance(value, torch.Tensor) and torch.is_grad_enabled() and not value.requires_grad
    return value.detach().requires_grad_() if lacks else value


def _graph(known: dict[tuple, Any], partitioner: Any, shapes: tuple, function: Any) -> Any:
    from torch._functorch.aot_autograd import aot_function

    if shapes not in known:
        known[shapes] = aot_function(
            function,
            fw_compiler=_as_it_is,
            bw_compiler=_as_it_is,
            partition_fn=functools.partial(partitioner, compiler="inductor"),
            decompositions=_decompositions(),
        )
    return known[shapes]


def _partitioner(budget: float) -> Any:
    """That of the training engine."""
    if budget < 1:
        from verl_omni.workers.engine.compile.memory_budget import within_budget

        return within_budget(budget)
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition


@functools.cache
def _decompositions() -> dict:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _as_it_is(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    def run(args: list[Any]) -> Any:
        return torch.fx.Interpreter(graph).boxed_run(args)

    run._boxed_call = True
    return run
