"""What passes of the compiler have in common: how they read the graphs that they are given, and change them."""

from collections.abc import Iterable
from typing import Any

import torch


def share(graph: torch.fx.Graph) -> None:
    """Calls of one operation with the same arguments become one, which inductor does not see to where there is no
    gradient. No number changes."""
    seen: dict[tuple, torch.fx.Node] = {}
    out = leaving(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or node in out or not all(map(is_pure, (node, *node.users))):
            continue
        first = seen.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)  # 1 is not 1.0
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def leaving(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """What the graph returns, and what has memory in common with it: each result is to be a tensor of its own."""
    results = {memory(node) for node in graph.output_node().all_input_nodes} - {None}
    return {node for node in graph.nodes if memory(node) in results}


def memory(node: torch.fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def is_pure(node: torch.fx.Node) -> bool:
    """Neither random nor written into; what leaves the graph, or is no operation of torch's, may be."""
    if node.op == "output":
        return True
    operation = node.target
    return (
        isinstance(operation, torch._ops.OpOverload)
        and not operation._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in operation.tags
    )


def add(graph: torch.fx.Graph, operation: torch._ops.OpOverload, *args: Any) -> torch.fx.Node:
    node = graph.call_function(operation, args)
    values = torch.fx.node.map_arg(args, lambda one: one.meta["val"])
    node.meta |= {"val": operation(*values), "eager_input_vals": (values, {})}  # the layouts that it is to be given
    return node


def hand_out(graph: torch.fx.Graph, whole: torch.fx.Node, products: Iterable[torch.fx.Node], dim: int) -> None:
    """To each product's users its part of the whole."""
    begin = 0
    for product in products:
        end = begin + product.meta["val"].shape[dim]
        product.replace_all_uses_with(add(graph, torch.ops.aten.slice.Tensor, whole, dim, begin, end))
        begin = end


def is_turned(node: torch.fx.Node) -> bool:
    aten = torch.ops.aten
    return node.target is aten.t.default or (node.target is aten.permute.default and list(node.args[1]) == [1, 0])


def is_given(node: torch.fx.Node | None) -> bool:
    """One of the graph's inputs, or an operation on them alone: it can be had at any place of the graph."""
    if node is None or node.op == "placeholder":
        return True
    return is_pure(node) and all(one.op == "placeholder" for one in node.all_input_nodes)
