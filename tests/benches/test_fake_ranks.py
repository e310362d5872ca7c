"""One rank of many computes with its own part, and is compared with a plan in what it computes alone."""

import types
from contextlib import contextmanager

import pytest
import torch

from benchmarks import fake_ranks, plan_check
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


def test_of_three_updates_the_middle_one_counts(monkeypatch, tmp_path):
    """The one before it compiles, the ones beside it were held up, or were not, and the one after it is profiled."""
    seconds = iter([50.0, 20.0, 1.0, 9.0, 2.0, 70.0])  # of the first two steps, and of the last
    clock = [0.0]

    class Worker:
        def __init__(self, config):
            module, adapter = (
                types.SimpleNamespace(parameters=lambda: []),
                types.SimpleNamespace(trained_modules=lambda module: {}),
            )
            self.engine = types.SimpleNamespace(module=module, adapter=adapter)

        def init_model(self): ...

        def update_actor(self, batch):
            clock[0] += next(seconds)

        def release(self, names): ...

    @contextmanager
    def nobody(*given):
        yield

    monkeypatch.setattr("verl_omni.workers.diffusion_worker.DiffusionWorker", Worker)
    monkeypatch.setattr("verl_omni.testing.local_trainer.local_config", lambda given: None)
    monkeypatch.setattr(fake_ranks.time, "perf_counter", lambda: clock[0])
    for name in ("join_fake_group", "draw", "as_batch"):
        monkeypatch.setattr(fake_ranks, name, lambda *given: None)
    profiles = []
    monkeypatch.setattr(fake_ranks, "profiled", lambda worker, folder: profiles.append(folder) or nobody())
    turns = types.SimpleNamespace(together=nobody, alone=nobody)
    found = fake_ranks.measure("tiny-qwen-image", 8, 8, 0, [], turns, tmp_path)
    assert profiles == [tmp_path / "rollout of 8", tmp_path / "update of 8"] and not list(seconds)
    assert found["update s"] == 2.0 and found["fastest to slowest s"] == [1.0, 9.0] and found["first update s"] == 50.0
    single = {"update s": 1.0, "rows": 8}
    assert fake_ranks.against(found, single) == 2.0 and fake_ranks.against(single, single) == 1.0
    assert found["update ms a row"] == 250.0 and (found["ranks"], found["rows"]) == (8, 8)


def test_channels_of_one_value_can_be_divided_by_their_norm():
    """Qwen-Image's CFG divides by it. The share of one of 64 ranks is one row of the last layer."""
    sample, *others = fake_ranks.channels_apart(None, (), (torch.zeros(2, 3, 64, dtype=torch.bfloat16), "more"))
    assert sample.dtype == torch.bfloat16 and others == ["more"]
    assert (sample.norm(dim=-1) > 0).all() and sample.abs().max() <= 0.0101


def test_a_profile_has_what_ran_inside(tmp_path):
    worker = types.SimpleNamespace(engine=types.SimpleNamespace(device=torch.device("cpu")))
    with fake_ranks.profiled(worker, tmp_path / "update of 8"):
        torch.ones(4).cumsum(0)
    assert "aten::cumsum" in (tmp_path / "update of 8/profile.txt").read_text()
