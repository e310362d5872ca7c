"""The ways to round that are compared differ as the table says."""

import torch

from benchmarks.folding import by_chance, nearest


def test_by_chance_is_right_on_average_and_the_nearest_is_not():
    frozen, product = torch.tensor([1.0, -1.0]).bfloat16(), torch.tensor([2.0**-9, 2.0**-10])  # a quarter of a bit each
    torch.manual_seed(0)
    drawn = torch.stack([by_chance(frozen, product.clone()).float() for _ in range(4000)])
    torch.testing.assert_close(drawn.mean(0), frozen.float() + product, atol=2e-4, rtol=0)
    assert torch.equal(nearest(frozen, product), frozen)
