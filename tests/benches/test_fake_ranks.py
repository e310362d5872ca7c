"""One rank of many computes with its own part, and is compared with a plan in what it computes alone."""

import pytest
import torch

from benchmarks import plan_check
from benchmarks.fake_ranks import own_part
from verl_omni.perf import rates


@pytest.mark.parametrize("shared_by", [1, 4, 8])
@pytest.mark.parametrize("shape", [(64,), (8, 8)])
def test_a_rank_gets_its_part_of_what_its_group_sums(shared_by, shape):
    """Of eight ranks in two copies, four share one."""
    summed, mine = torch.arange(64.0), torch.zeros(64 // shared_by)
    own_part(mine, summed.reshape(shape), group=None)
    assert mine.equal(summed[: 64 // shared_by])


def test_of_many_ranks_what_they_send_is_not_compared(monkeypatch, tmp_path):
    """Nothing was sent where it was measured: a network of a byte a second changes nothing."""
    monkeypatch.setattr(rates, "WITHIN_MACHINE", 1.0)
    monkeypatch.setattr(rates, "BETWEEN_MACHINES", 1.0)
    case = plan_check.Case(
        "tiny-qwen-image", "", 4, ["actor_rollout_ref.actor.engine.use_torch_compile=false"], ranks=16
    )
    _, seconds = plan_check.planned(case, tmp_path, {})
    assert 0 < seconds < 1
