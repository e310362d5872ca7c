"""A pass of the compiler: what a graph computes twice is computed once.

Inductor does not look for that where there is no gradient. In 8 bits query, key and value would quantise one input
three times over, each with a copy of its own.
"""

import functools
from typing import Any

import torch


@functools.cache  # one for all blocks, so that dynamo sees one compiler and shares their graphs
def computed_once() -> Any:
    """For `options` of `torch.compile`, under `post_grad_custom_pre_pass`."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class ComputedOnce(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            share(graph)

        def uuid(self) -> str:
            """By which kernels on disk are found: another one, where `share` does something else."""
            return "verl_omni computed once, 1"

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
