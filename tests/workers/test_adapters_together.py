"""LoRA on layers of one input: fewer products, the same gradients."""

import re

import pytest
import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import layer_norm, linear, rms_norm

from verl_omni.workers.engine.compile.adapters_together import PRODUCT, adapters_together, put_together

WIDTH, RANK, ROWS = 64, 4, (2, 96)
PRODUCTS = re.compile(r"(?:extern_kernels\.(?:mm|addmm)|_mkl_linear|_linear_pointwise\w*)\(")


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


FROZEN = [drawn(WIDTH, WIDTH, seed=10 + number) for number in range(3)]
BIAS = drawn(WIDTH, seed=13)


def adapters() -> list[torch.Tensor]:
    """A of three layers, and then B of them."""
    shapes = [(RANK, WIDTH)] * 3 + [(WIDTH, RANK)] * 3
    return [drawn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def projected(x, adapters, number):
    """A frozen layer and LoRA beside it, as PEFT computes them."""
    low = linear(x.to(adapters[number].dtype), adapters[number])
    return linear(x, FROZEN[number].to(x.dtype), BIAS.to(x.dtype)) + linear(low, adapters[3 + number]) * 0.5


def attention_like(x, adapters):
    """Query and key with a norm of their own; x is used by nothing else."""
    x = layer_norm(x, (WIDTH,))
    query, key, value = (projected(x, adapters, number) for number in range(3))
    return rms_norm(query, (WIDTH,)) + rms_norm(key, (WIDTH,)) * value


def also_elsewhere(x, adapters):
    """x goes on beside its layers, so that its gradient has parts that are no products."""
    x = layer_norm(x, (WIDTH,))
    query, key, value = (projected(x, adapters, number) for number in range(3))
    return query * key + value + x.sigmoid()


def one_input_each(x, adapters):
    parts = (layer_norm(x * (1 + number), (WIDTH,)) for number in range(3))
    return sum(projected(part, adapters, number).sigmoid() for number, part in enumerate(parts))


def gradients(function, x, adapters, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = function(x, adapters)
    return [found, *torch.autograd.grad(found, [x, *adapters], drawn(*found.shape, seed=30).to(found.dtype))]


def compiled(function, options, dtype):
    """(output and gradients, products in the graph of the forward and in that of the backward)."""
    torch._dynamo.reset()
    x = drawn(*ROWS, WIDTH, seed=20).to(dtype).requires_grad_()
    autocast, given = dtype == torch.bfloat16, adapters()
    called = torch.compile(function, options=options)
    with torch._inductor.config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(lambda: gradients(called, x, given, autocast))
    return found, gradients(function, x, given, autocast), [len(PRODUCTS.findall(code)) for code in codes]


@pytest.mark.slow  # the compiler
@pytest.mark.parametrize(
    ("function", "apart", "together"),
    [
        # forward 3 layers, 3 A, 3 B; backward those of their inputs, and of the gradients of A and B
        (attention_like, [9, 15], [7, 11]),
        (also_elsewhere, [9, 15], [7, 11]),
        (one_input_each, [9, 15], [9, 15]),
    ],
)
def test_fewer_products_and_the_same_gradients(function, apart, together):
    *_, plain = compiled(function, {}, torch.float32)
    found, exact, counted = compiled(function, {"joint_custom_post_pass": adapters_together()}, torch.float32)
    assert (plain, counted) == (apart, together)
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@pytest.mark.slow  # the compiler
def test_in_bfloat16_it_rounds_no_more_often():
    """As an update on a GPU, under autocast: as near to float32 as without."""
    options = {"joint_custom_post_pass": adapters_together()}
    *_, exact, _ = compiled(attention_like, {}, torch.float32)
    apart, _, _ = compiled(attention_like, {}, torch.bfloat16)
    together, _, counted = compiled(attention_like, options, torch.bfloat16)
    assert counted == [7, 11]
    for one, other, true in zip(together, apart, exact, strict=True):
        off, usual = ((found.float() - true).norm() / true.norm() for found in (one, other))
        assert off < 1.1 * usual + 1e-6 and off < 0.02


SUMS = {
    "one after the other": lambda parts, rest: ((parts[0] + rest) + parts[1]) + parts[2],
    "two before": lambda parts, rest: parts[0] + ((parts[1] + parts[2]) + rest),
    "seen otherwise": lambda parts, rest: (
        parts[1].view(*ROWS, WIDTH) + (parts[2] + (rest + parts[0])).view(*ROWS, WIDTH)
    ),
}
APART = {  # what is no part of one sum stays as it is
    "one is used twice": (lambda parts, rest: (parts[0] + parts[1] + parts[2]) * parts[1], 2),
    "two sums": (lambda parts, rest: ((parts[0] + rest) * 2, parts[1] + parts[2]), 3),
    "times two": (lambda parts, rest: torch.add(parts[0] + parts[1], parts[2], alpha=2), 2),
    "row by row": (lambda parts, rest: parts[0] + parts[1] + parts[2][:1], 2),
    "half precision is added": (
        lambda parts, rest: parts[0] + parts[1] + ((parts[2] + rest.bfloat16()) + (1 / rest).bfloat16()),
        2,
    ),
}


def backward(x, inner, weights, rest, summed):
    """What a backward has of three adapters of one input, with their products in the graph of the forward."""
    forward = [x @ weight.permute(1, 0) * 2 for weight in weights]
    gradients = [one.permute(1, 0) @ x for one in inner]
    return forward, gradients, summed([one @ weight for one, weight in zip(inner, weights, strict=True)], rest)


@pytest.mark.parametrize(
    ("summed", "left"), [*((summed, 1) for summed in SUMS.values()), *APART.values()], ids=[*SUMS, *APART]
)
def test_parts_of_one_sum_are_one_product(summed, left):
    rows = ROWS[0] * ROWS[1]
    inner, weights = (
        [drawn(*shape, seed=seed + i) for i in range(3)] for shape, seed in (((rows, RANK), 40), ((RANK, WIDTH), 50))
    )
    given = drawn(rows, WIDTH, seed=60).double(), [t.double() for t in inner], [w.double() for w in weights]
    given = *given, drawn(rows, WIDTH, seed=61).double()
    assert put_together_in(lambda *given: backward(*given, summed), *given) == 2 + left


def put_together_in(function, *given) -> int:
    """The products that are left. What is returned stays what it was."""
    graph = make_fx(function, tracing_mode="fake")(*given)
    before = torch.utils._pytree.tree_leaves(graph(*given))
    put_together(graph.graph)
    stable_topological_sort(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    for one, other in zip(torch.utils._pytree.tree_leaves(graph(*given)), before, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()
    return sum(node.target is PRODUCT for node in graph.graph.nodes)


def lows_and_gradients(x, first, second, inner, between):
    """Two adapters, and x's products with what `between` makes of them and of a gradient."""
    lows = x @ first.permute(1, 0) * 2, x @ second.permute(1, 0) * 2
    one, other = between(*lows, inner, x)
    return lows, one.permute(1, 0) @ x * 2, other.permute(1, 0) @ x * 2


def one_of_the_forward(low, _, inner, x):
    return low, inner


def one_after_the_other(low, _, inner, x):
    return inner, inner * (inner.permute(1, 0) @ x).sum()


@pytest.mark.parametrize("between", [one_of_the_forward, one_after_the_other])
def test_what_cannot_be_had_at_one_place_stays_apart(between):
    def traced(x, first, second, tangents):
        return lows_and_gradients(x, first, second, tangents, between)

    given = (drawn(96, WIDTH, seed=1), drawn(RANK, WIDTH, seed=2), drawn(RANK, WIDTH, seed=3), drawn(96, RANK, seed=4))
    assert put_together_in(traced, *given) == 3


def test_what_a_block_returns_lies_as_it_did():
    """Columns of one tensor could not be viewed as rows."""

    def traced(x, first, second):
        return x @ first.permute(1, 0), x @ second.permute(1, 0)

    assert (
        put_together_in(traced, drawn(96, WIDTH, seed=1), drawn(RANK, WIDTH, seed=2), drawn(RANK, WIDTH, seed=3)) == 2
    )
