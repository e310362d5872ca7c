"""A pass of the compiler for graphs in 8 bits, most of whose time beside the products goes to quantising.

By itself inductor quantises the one input of query, key and value three times over, each with a copy of its own, as the
product asks for exact strides, and multiplies it three times, each time with a third of the work of one product.
"""

import functools
from collections import defaultdict
from typing import Any

import torch

from verl_omni.workers.engine.compile import graphs
from verl_omni.workers.engine.compile.graphs import add, hand_out, is_given, is_turned, leaving, share

aten = torch.ops.aten
PRODUCT = aten._scaled_mm.default


@functools.cache  # one for all blocks, so that dynamo sees one compiler and shares their graphs
def in_eight_bits() -> Any:
    """For `options` of `torch.compile`, under `post_grad_custom_pre_pass`."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class InEightBits(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            share(graph)
            multiply_at_once(graph)
            tell_by_sigmoid(graph)

        def uuid(self) -> bytes:
            """By which kernels on disk are found: another one, where the pass may do something else."""
            return get_hash_for_files((__file__, graphs.__file__))

    return InEightBits()


def multiply_at_once(graph: torch.fx.Graph) -> None:
    """8-bit products of one input become one, of their weights below each other: the same sums, of which each layer
    takes its columns.

    Each row of a weight has a scale of its own, so that nothing is quantised otherwise. A forward of SD3.5-medium takes
    a hundredth less, weights copied together in it.
    """
    from torch._inductor.pattern_matcher import stable_topological_sort

    alike = defaultdict(list)
    out = leaving(graph)
    for node in graph.find_nodes(op="call_function", target=PRODUCT):
        if node not in out:
            given = arguments(node)
            weight, scale, bias = (given.pop(name, None) for name in ("mat2", "scale_b", "bias"))
            if is_turned(weight) and is_turned(scale):
                alike[repr(given), bias is None].append((node, weight.args[0], scale.args[0], bias))
    for products in alike.values():
        if len(products) > 1 and all(is_given(part) for _, *parts in products for part in parts):
            join(graph, *zip(*products, strict=True))
    stable_topological_sort(graph)  # a bias is converted just before its own product


def join(graph: torch.fx.Graph, products: Any, weights: Any, scales: Any, biases: Any) -> None:
    """One product where the first was."""
    first = products[0]
    with graph.inserting_before(first):
        weight, scale = (add(graph, aten.cat.default, list(parts)) for parts in (weights, scales))
        given = arguments(first) | {
            "mat2": add(graph, aten.permute.default, weight, [1, 0]),  # of other passes, who know no `t`
            "scale_b": add(graph, aten.permute.default, scale, [1, 0]),
            "bias": None if biases[0] is None else add(graph, aten.cat.default, list(biases)),
        }
        hand_out(graph, add(graph, PRODUCT, *given.values()), products, dim=1)
    for product in products:
        graph.erase_node(product)


def tell_by_sigmoid(graph: torch.fx.Graph) -> None:
    """1 + tanh(z) = 2 / (1 + exp(-2z)): GELU's tanh takes the device more than twice as many instructions, and is
    computed once for the largest value of a row and once more to quantise it."""
    for node in graph.find_nodes(op="call_function", target=aten.tanh.default):
        for user in [user for user in node.users if is_one_more(user, node)]:
            with graph.inserting_before(user):
                half = add(graph, aten.sigmoid.default, add(graph, aten.mul.Tensor, node.args[0], 2))
                user.replace_all_uses_with(add(graph, aten.mul.Tensor, half, 2))


def is_one_more(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    return user.target is aten.add.Tensor and user.args == (node, 1) and not user.kwargs


def arguments(product: torch.fx.Node) -> dict[str, Any]:
    """By name, in their order."""
    names = [argument.name for argument in PRODUCT._schema.arguments]
    return dict.fromkeys(names) | dict(zip(names, product.args, strict=False)) | product.kwargs
