"""8-bit products of one input are one product, with the same numbers."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from verl_omni.workers.engine.compile.graphs import share
from verl_omni.workers.engine.compile.in_eight_bits import PRODUCT, in_eight_bits, multiply_at_once, tell_by_sigmoid
from verl_omni.workers.engine.fp8 import quantised

WIDTHS = (48, 16, 32)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return *quantised(drawn(width, 32, seed=seed)), drawn(width, seed=seed + 10)


LAYERS = [layer(width, seed) for seed, width in enumerate(WIDTHS)]


def multiplied(x, weight, scale, bias):
    """As `product` does on a GPU."""
    rows, row_scale = quantised(x.flatten(0, -2))
    bias = None if bias is None else bias.to(torch.bfloat16)
    given = dict(bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)
    return torch._scaled_mm(rows, weight.t(), row_scale, scale.t(), **given).unflatten(0, x.shape[:-1])


def attended(x, layers):
    """Each result is used before the next is computed, as a norm of the query is."""
    return [multiplied(x, *one).float().softmax(-1) for one in layers]


class Emulated(torch.fx.Interpreter):
    """Not every torch multiplies with a scale a row on a CPU."""

    def call_function(self, target, args, kwargs):
        if target is not PRODUCT:
            return super().call_function(target, args, kwargs)
        rows, weight, row_scale, scale, bias, _, dtype, *_ = args
        found = rows.double() @ weight.double() * row_scale * scale
        return (found if bias is None else found + bias.double()).to(dtype)


def joined(function, *args):
    """(products that are left, what the graph gives, what it gave before)."""
    graph = make_fx(function, tracing_mode="fake")(*args)
    given = torch.utils._pytree.tree_leaves(args)
    before = Emulated(graph).run(*given)
    share(graph.graph)
    multiply_at_once(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return sum(node.target is PRODUCT for node in graph.graph.nodes), Emulated(graph).run(*given), before


def rows_are_scaled_here():
    rows, scale = quantised(torch.ones(16, 16))
    try:
        torch._scaled_mm(rows, rows.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("with_bias", [True, False])
def test_products_of_one_input_are_one(with_bias):
    layers = LAYERS if with_bias else [(*one[:2], None) for one in LAYERS]
    products, after, before = joined(attended, drawn(2, 8, 32, seed=20), layers)
    assert products == 1 and [found.shape[-1] for found in after] == list(WIDTHS)
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))


def test_other_inputs_and_layers_without_a_bias_stay_apart():
    def several(x, y, layers):
        first, second, third = layers
        calls = (x, *first), (y, *second), (x, *third[:2], None), (y, *third)
        return [multiplied(*call).float() for call in calls]

    products, after, before = joined(several, drawn(2, 8, 32, seed=20), drawn(2, 8, 32, seed=21), LAYERS)
    assert products == 3
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))


def test_layers_of_two_inputs_are_one_product_for_each():
    """Their biases, converted once, are used by both."""

    def twice(x, y, layers):
        return attended(x, layers) + attended(y, layers)

    products, after, before = joined(twice, drawn(2, 8, 32, seed=20), drawn(2, 8, 32, seed=21), LAYERS)
    assert products == 2
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))


def test_results_of_a_block_lie_as_they_did():
    """Columns of one tensor could not be viewed as rows."""

    def returned(x, layers):
        return [multiplied(x, *one) for one in layers]

    products, after, before = joined(returned, drawn(2, 8, 32, seed=20), LAYERS)
    assert products == 3
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
    assert all(found.is_contiguous() for found in after)


def test_a_weight_that_comes_of_a_product_stays_where_it_is():
    def chained(x, layers):
        (weight, scale, bias), other, _ = layers
        first = multiplied(x, weight, scale, bias)
        return multiplied(x, other[0], other[1] * first.float().abs().max(), other[2])

    products, after, before = joined(chained, drawn(2, 8, 32, seed=20), LAYERS)
    assert products == 2 and torch.equal(after, before)


@pytest.mark.parametrize(("times", "left"), [({}, 0), ({"alpha": 3}, 1)])
def test_one_more_than_tanh_is_told_by_sigmoid(times, left):
    given = torch.linspace(-20, 20, 81)
    graph = make_fx(lambda z: torch.add(torch.tanh(z), 1, **times), tracing_mode="fake")(given)
    before = graph(given)
    tell_by_sigmoid(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    torch.testing.assert_close(graph(given), before)
    assert sum(node.target is torch.ops.aten.tanh.default for node in graph.graph.nodes) == left


@pytest.mark.slow  # 20 s: the compiler
@pytest.mark.skipif(not rows_are_scaled_here(), reason="this torch multiplies with a scale a row on a GPU only")
def test_the_compiler_multiplies_once():
    """Bit for bit what it makes without."""
    x, made = drawn(2, 8, 32, seed=20), []
    for options in (None, {"post_grad_custom_pre_pass": in_eight_bits()}):
        torch._dynamo.reset()
        with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
            found, (code,) = run_and_get_code(torch.compile(attended, options=options), x, LAYERS)
        made.append((found, len(re.findall(r"extern_kernels\._scaled_mm\(", code))))
    assert [count for _, count in made] == [3, 1]
    assert all(torch.equal(one, other) for one, other in zip(made[0][0], made[1][0], strict=True))
