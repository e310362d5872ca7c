"""A pass of the compiler for graphs without a gradient: what is computed twice is computed once, and at once.

Inductor does not look for that where there is no gradient. In 8 bits query, key and value would quantise one input
three times over, each with a copy of its own, and multiply it three times, each time with a third of the work of one
product.
"""

import functools
from collections import defaultdict
from typing import Any

import torch

PRODUCT = torch.ops.aten._scaled_mm.default


@functools.cache  # one for all blocks, so that dynamo sees one compiler and shares their graphs
def computed_once() -> Any:
    """For `options` of `torch.compile`, under `post_grad_custom_pre_pass`."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class ComputedOnce(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            share(graph)
            multiply_at_once(graph)

        def uuid(self) -> str:
            """By which kernels on disk are found: another one, where the pass does something else."""
            return "verl_omni computed once, 2"

    return ComputedOnce()


def share(graph: torch.fx.Graph) -> None:
    """Calls of one operation with the same arguments become one. No number changes."""
    seen: dict[tuple, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_pure(node) or any(not is_pure(user) for user in node.users):
            continue
        first = seen.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)  # 1 is not 1.0
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


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


def multiply_at_once(graph: torch.fx.Graph) -> None:
    """8-bit products of one input become one, of their weights below each other: the same sums, of which each layer
    takes its columns.

    Each row of a weight has a scale of its own, so that nothing is quantised otherwise. Copying weights together takes
    a hundredth of the product, which is 1.4 times as fast in one piece as in three.
    """
    alike = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is PRODUCT:
            given = arguments(node)
            weight, scale, bias = (given.pop(name, None) for name in ("mat2", "scale_b", "bias"))
            if is_turned(weight) and is_turned(scale):
                alike[repr(given), bias is None].append((node, weight.args[0], scale.args[0], bias))
    for products in alike.values():
        if len(products) > 1 and all(is_given(part) for _, *parts in products for part in parts):
            join(graph, *zip(*products, strict=True))


def join(graph: torch.fx.Graph, products: Any, weights: Any, scales: Any, biases: Any) -> None:
    """One product where the first was."""
    first = products[0]
    for part in (*weights, *scales, *biases):
        if part is not None and part.op != "placeholder":
            first.prepend(part)
    with graph.inserting_before(first):
        weight, scale = (add(graph, torch.ops.aten.cat.default, list(parts)) for parts in (weights, scales))
        given = arguments(first) | {
            "mat2": add(graph, torch.ops.aten.permute.default, weight, [1, 0]),  # of other passes, who know no `t`
            "scale_b": add(graph, torch.ops.aten.permute.default, scale, [1, 0]),
            "bias": None if biases[0] is None else add(graph, torch.ops.aten.cat.default, list(biases)),
        }
        whole, begin = add(graph, PRODUCT, *given.values()), 0
        for product in products:
            end = begin + product.meta["val"].shape[1]
            product.replace_all_uses_with(add(graph, torch.ops.aten.slice.Tensor, whole, 1, begin, end))
            begin = end
    for product in products:
        graph.erase_node(product)


def add(graph: torch.fx.Graph, operation: torch._ops.OpOverload, *args: Any) -> torch.fx.Node:
    node = graph.call_function(operation, args)
    values = torch.fx.node.map_arg(args, lambda one: one.meta["val"])
    node.meta |= {"val": operation(*values), "eager_input_vals": (values, {})}  # the layouts that it is to be given
    return node


def arguments(product: torch.fx.Node) -> dict[str, Any]:
    """By name, in their order."""
    names = [argument.name for argument in PRODUCT._schema.arguments]
    return dict.fromkeys(names) | dict(zip(names, product.args, strict=False)) | product.kwargs


def is_turned(node: torch.fx.Node) -> bool:
    aten = torch.ops.aten
    return node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == [1, 0])


def is_given(node: torch.fx.Node | None) -> bool:
    """One of the graph's inputs, or an operation on them alone: it can be had at any place of the graph."""
    if node is None or node.op == "placeholder":
        return True
    return is_pure(node) and all(one.op == "placeholder" for one in node.all_input_nodes)
