"""A pass of the compiler for graphs with a gradient: adapters of one input are multiplied together.

Query, key and value of a block have one input x, and with LoRA each has a product x Aᵢᵀ of its own, which reads all of
x for a few columns. Backward there are as many products tᵢᵀ x for the gradients of Aᵢ, and as many tᵢ Aᵢ, each as large
as x, whose sum is a part of x's gradient. Side by side all Aᵢ are one A:

    [x A₁ᵀ, x A₂ᵀ, ...] = x Aᵀ        [∂A₁; ∂A₂; ...] = [t₁, t₂, ...]ᵀ x        Σ tᵢ Aᵢ = [t₁, t₂, ...] A

The first two are the same sums. The third is added up before it is rounded.
"""

import functools
from collections import defaultdict
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from verl_omni.workers.engine.compile import graphs
from verl_omni.workers.engine.compile.graphs import add, hand_out, is_given, is_turned, leaving, share

aten = torch.ops.aten
PRODUCT, TURN, CONVERT = aten.mm.default, aten.permute.default, torch.ops.prims.convert_element_type.default
VIEWS = (aten.view.default, aten.reshape.default)
NARROW = 512  # columns: of an adapter, not of a layer


@functools.cache  # one for all blocks, so that dynamo sees one compiler and shares their graphs
def adapters_together() -> Any:
    """For `options` of `torch.compile`, under `joint_custom_post_pass`."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class AdaptersTogether(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            put_together(graph)

        def uuid(self) -> bytes:
            """By which kernels on disk are found: another one, where the pass may do something else."""
            return get_hash_for_files((__file__, graphs.__file__))

    return AdaptersTogether()


def put_together(graph: torch.fx.Graph) -> None:
    """Inductor sorts the nodes after it."""
    simplify(graph)
    share(graph)
    forward, backward = defaultdict(list), defaultdict(list)
    out = leaving(graph)
    for node in graph.find_nodes(op="call_function", target=PRODUCT):
        left, right = node.args
        if is_turned(right) and is_narrow(node, 1) and is_weight(right.args[0]) and node not in out:
            forward[left].append(node)
        if is_turned(left) and is_narrow(node, 0):
            backward[right].append(node)
    for x, products in forward.items():
        if len(products) > 1:
            side_by_side(graph, x, products)
            if len(backward[x]) > 1 and can_be_one(backward[x]):
                inner = [product.args[0].args[0] for product in backward[x]]
                below_each_other(graph, x, inner, backward[x])
                as_one_sum(graph, inner)


def side_by_side(graph: torch.fx.Graph, x: torch.fx.Node, products: list[torch.fx.Node]) -> None:
    """x Aᵀ in place of each x Aᵢᵀ."""
    with graph.inserting_before(products[0]):
        weight = add(graph, aten.cat.default, [product.args[1].args[0] for product in products])
        whole = add(graph, PRODUCT, x, add(graph, TURN, weight, [1, 0]))
        hand_out(graph, whole, products, dim=1)


def below_each_other(
    graph: torch.fx.Graph, x: torch.fx.Node, inner: list[torch.fx.Node], products: list[torch.fx.Node]
) -> None:
    """[t₁, t₂, ...]ᵀ x in place of each tᵢᵀ x."""
    with graph.inserting_before(products[-1]):
        turned = add(graph, TURN, add(graph, aten.cat.default, inner, 1), [1, 0])
        hand_out(graph, add(graph, PRODUCT, turned, x), products, dim=0)


def as_one_sum(graph: torch.fx.Graph, inner: list[torch.fx.Node]) -> None:
    """[t₁, t₂, ...] A in place of tᵢ Aᵢ, where these are parts of one sum and nothing else."""
    parts = [product for t in inner for product in t.users if is_part(product, t)]
    if len(parts) < 2 or not set.intersection(*(set(sums(product)) for product in parts)):
        return
    first, *others = parts
    with graph.inserting_before(others[-1]):
        left, right = (add(graph, aten.cat.default, [part.args[side] for part in parts], 1 - side) for side in (0, 1))
        whole = add(graph, PRODUCT, left, right)
    for product in others:
        own, *_ = sums(product)
        (rest,) = (one for one in own.args if one is not seen_as(product))
        own.replace_all_uses_with(rest)
        graph.erase_node(own)
    first.replace_all_uses_with(whole)


def seen_as(product: torch.fx.Node) -> torch.fx.Node:
    """What is added: the product, or a view of it."""
    while (user := next(iter(product.users))).target in VIEWS:
        product = user
    return product


def is_part(product: torch.fx.Node, t: torch.fx.Node) -> bool:
    return product.target is PRODUCT and product.args[0] is t and is_weight(product.args[1]) and bool(sums(product))


def sums(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The sums that it is a part of, one after the other; of its own dtype and number of values, and in their order."""
    found = []
    like = node.meta["val"]
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in (aten.add.Tensor, *VIEWS) or user.meta["val"].dtype != like.dtype:
            break
        if user.target is aten.add.Tensor:
            values = [one.meta["val"] for one in user.all_input_nodes]
            if user.kwargs or len(values) != 2 or not is_same(*values):
                break
            found.append(user)
        node = user
    return found


def simplify(graph: torch.fx.Graph) -> None:
    """No conversion to what something is already, and nothing turned twice: what is the same is to look the same."""
    out = leaving(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.all_input_nodes or node in out:
            continue
        before = node.all_input_nodes[0]
        if node.target is CONVERT and before.meta["val"].dtype == node.args[1]:
            same = before
        elif is_turned(node) and is_turned(before):
            same = before.args[0]
        else:
            continue
        node.replace_all_uses_with(same)
        graph.erase_node(node)


def is_narrow(product: torch.fx.Node, dim: int) -> bool:
    size = product.meta["val"].shape[dim]
    return isinstance(size, int) and size <= NARROW


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """In its dtype, and in its shape for all sizes that a graph of any size is for."""
    sizes = zip(one.shape, other.shape, strict=False)
    return (one.dtype, one.ndim) == (other.dtype, other.ndim) and all(statically_known_true(a == b) for a, b in sizes)


def is_weight(node: torch.fx.Node) -> bool:
    """A parameter, or what autocast makes of it; no gradient that comes in."""
    return is_given(node) and not any(map(comes_in, (node, *node.all_input_nodes)))


def comes_in(node: torch.fx.Node) -> bool:
    """As a gradient."""
    return node.op == "placeholder" and "tangents" in node.name


def can_be_one(products: list[torch.fx.Node]) -> bool:
    """None is needed for another, and all or none wait for a gradient that comes in."""
    before = [needed(product) for product in products]
    return len({any(map(comes_in, found)) for found in before}) == 1 and not set(products) & set.union(*before)


def needed(node: torch.fx.Node) -> set[torch.fx.Node]:
    found, left = set(), [node]
    while left:
        more = set(left.pop().all_input_nodes) - found
        found |= more
        left += more
    return found
