"""Rates that were fitted to a step give its seconds back."""

import pytest

from verl_omni.perf.rates import rates


def test_of_wan_the_large_one_has_rates_of_its_own():
    """Wan2.2 A14B on an H200, as docs/performance.md has it: of a step's 52.02 s 36.8 to draw, 13.5 to update."""
    forward, backward = 508.844e12, 1267.833e12  # of one video of 33 frames, with checkpointing
    large, small = rates("h200", "WanPipeline", 28.6e9), rates("h200", "WanPipeline", 1.4e9)
    assert 2 * 10 * 2 * forward / large.denoise == pytest.approx(36.8, rel=0.01)
    assert 4 * (forward + backward) / large.update == pytest.approx(13.5, rel=0.01)
    assert "A14B" in large.where and "1.3B" in small.where and large.update > 1.2 * small.update
    assert rates("h200", "FluxPipeline", 28.6e9) == rates("h200", "FluxPipeline")
