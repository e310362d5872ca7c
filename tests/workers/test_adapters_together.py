"""LoRA on layers of one input: fewer products, the same gradients."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import layer_norm, linear, rms_norm

from verl_omni.workers.engine.compile.adapters_together import adapters_together

WIDTH, RANK, ROWS = 64, 4, (2, 96)
PRODUCTS = re.compile(r"(?:extern_kernels\.(?:mm|addmm)|_mkl_linear|_linear_pointwise\w*)\(")

pytestmark = pytest.mark.slow  # the compiler


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
