"""Blocks that keep between forward and backward what they keep when they are compiled."""

import contextlib
import functools
import operator
from typing import Any

import torch
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from verl_omni.utils.call_signature import by_name
from verl_omni.workers.engine.compile.blocks import streams

UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # which is a view, and does not say so


class Partitioned:
    """While it lasts, the first two blocks of each kind run as AOTAutograd's graphs, parted as inductor parts them.

    One graph serves all blocks of a kind: it is told their weights. `budget`: as `actor.engine` has it, for those whose
    arithmetic is counted too; without one a forward runs only as far as its outputs ask, and no backward does.
    """

    def __init__(self, kinds: dict[tuple, list[tuple[torch.nn.ModuleList, str]]], budget: float | None = None):
        self.kinds, self.budget, self._before = kinds, budget, contextlib.ExitStack()

    def __enter__(self) -> "Partitioned":
        for blocks in self.kinds.values():
            graph = functools.partial(_graph, {}, self.budget)
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
    with _use_lazy_graph_module(True):  # nobody runs their code
        return graph(shapes, len(weights), function)(list(weights), tensors)


def _trained(value: Any) -> Any:
    """As the engine gives it to the first block too: under LoRA it has no gradient there, and one graph serves all."""
    lacks = isinstance(value, torch.Tensor) and torch.is_grad_enabled() and not value.requires_grad
    return value.detach().requires_grad_() if lacks else value


def _graph(known: dict[tuple, Any], budget: float | None, shapes: tuple, count: int, function: Any) -> Any:
    """`count`: of weights, which come first."""
    from torch._functorch.aot_autograd import aot_function

    if shapes not in known:
        known[shapes] = aot_function(
            function,
            fw_compiler=_outputs_alone if budget is None else _as_it_is,
            bw_compiler=_never_run if budget is None else _as_it_is,
            partition_fn=functools.partial(_parted, budget, count),
            decompositions=_decompositions(),
        )
    return known[shapes]


def _parted(budget: float | None, weights: int, joint: torch.fx.GraphModule, inputs: Any, **how: Any) -> tuple:
    """As dynamo has it done, which says of a budget what are weights: they are there anyway, and what is made of them
    is made again."""
    how |= {} if budget is None else {"static_lifetime_input_indices": [*range(weights)]}
    return _partitioner(budget)(joint, inputs, compiler="inductor", **how)


def import_compiler() -> None:
    """What inductor imports takes seconds: once, before there are copies of this process."""
    import networkx  # noqa: F401  (by which the partitioner cuts)

    _decompositions()


def _partitioner(budget: float | None) -> Any:
    """That of the training engine."""
    if budget is not None and budget < 1:
        from verl_omni.workers.engine.compile.memory_budget import within_budget

        return within_budget(budget)
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition


@functools.cache
def _decompositions() -> dict:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _outputs_alone(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Runs no more of a forward than what its outputs are views of: of all else it is enough that it has memory."""
    *_, last = graph.graph.nodes

    def run(args: list[Any]) -> list[Any]:
        found = dict(zip(graph.graph.find_nodes(op="placeholder"), args, strict=True))
        args.clear()
        return [_value(node, found) if isinstance(node, torch.fx.Node) else node for node in last.args[0]]

    run._boxed_call = True
    return run


def _value(node: torch.fx.Node, found: dict[torch.fx.Node, Any]) -> Any:
    if node not in found:
        like = node.meta["val"]
        if isinstance(like, torch.Tensor) and _is_new(node):
            found[node] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        else:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), functools.partial(_value, found=found))
            found[node] = node.target(*args, **kwargs)
    return found[node]


def _is_new(node: torch.fx.Node) -> bool:
    """Whether it has memory of its own."""
    made_by = (node.args[0] if node.target is operator.getitem else node).target
    known = isinstance(made_by, torch._ops.OpOverload) and made_by is not UNSAFE_VIEW
    return known and not any(one.alias_info for one in made_by._schema.returns)


def _as_it_is(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    def run(args: list[Any]) -> Any:
        return torch.fx.Interpreter(graph).boxed_run(args)

    run._boxed_call = True
    return run


def _never_run(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    def run(args: list[Any]) -> Any:
        raise AssertionError("the backward of a block that only says what it keeps")

    run._boxed_call = True
    return run
