from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from diffusers import Lumina2Transformer2DModel, SD3Transformer2DModel
from tiny_models import tiny_sd3_transformer
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from verl_omni.config import DiffusionRolloutConfig
from verl_omni.perf.flops import FlopMeter, count_flops, count_in_a_process, without_features
from verl_omni.workers.diffusion_worker import DiffusionWorker
from verl_omni.workers.layout import Layout


def transformer() -> SD3Transformer2DModel:
    return tiny_sd3_transformer(num_layers=2)


def call(module: torch.nn.Module, rows: int) -> torch.Tensor:
    return module(
        hidden_states=torch.randn(rows, 4, 8, 8),
        timestep=torch.full((rows,), 500.0),
        encoder_hidden_states=torch.randn(rows, 5, 16),
        pooled_projections=torch.randn(rows, 16),
        return_dict=False,
    )[0]


def test_costs_are_those_of_torchs_counter(monkeypatch):
    """Three rows without a gradient and five with one, against the counter on the very same calls.

    torch's counter does not know the CPU's fused attention: it counts attention by its matrix products. The module is
    sharded, which costs nothing more. One of the two is counted in a process of its own, as both are in a run.
    """
    module = transformer()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        with torch.no_grad():
            call(module, 3)
        call(module, 5).sum().backward()

    counted = []

    def count(one: tuple) -> float:
        counted.append(one)
        return count_in_a_process(one) if one[-1] else 0.0

    monkeypatch.setattr("verl_omni.perf.flops.count_in_a_process", count)
    module.__class__ = type("FSDPSD3Transformer2DModel", (FSDPModule, SD3Transformer2DModel), {})  # as fully_shard does
    meter = FlopMeter([module])
    with torch.no_grad():
        call(module, 3)
    call(module, 5).sum().backward()
    meter._thread.shutdown(wait=True)
    without_gradient, _ = counted
    assert meter.take() + 3 * count_flops(*without_gradient) == counter.get_total_flops()


def test_a_model_that_looks_at_a_mask_is_counted():
    """Lumina 2 asks how long a text is."""
    config = dict(hidden_size=48, num_layers=1, num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1,
                  multiple_of=16, axes_dim_rope=(4, 6, 6), cap_feat_dim=8, in_channels=4)  # fmt: skip
    module = Lumina2Transformer2DModel(**config)
    mask = torch.ones(1, 5, dtype=torch.bool)
    given = {"timestep": torch.ones(1), "encoder_attention_mask": mask, "return_dict": False}
    given |= {"hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 5, 8)}
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        module(**given)
    shapes = {k: without_features(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    assert shapes["hidden_states"].is_meta and not shapes["encoder_attention_mask"].is_meta
    counted = count_flops(Lumina2Transformer2DModel, dict(module.config), None, shapes, backward=False)
    assert counted == counter.get_total_flops()


@pytest.mark.parametrize(
    ("stage", "share_samples", "part"),
    [("update_actor", False, 4), ("ref", True, 4), ("gen", True, 4), ("gen", False, 1)],
)
def test_ranks_that_share_a_sample_have_done_a_part_of_it(stage, share_samples, part, monkeypatch):
    """Rows are counted before they are cut. Where ranks draw samples of their own, each computes all of them."""
    monkeypatch.setattr("verl_omni.perf.flops.count_in_a_process", lambda call: 8.0)
    module = transformer()
    worker = SimpleNamespace(flop_meter=FlopMeter([module]), flops={})
    worker.engine = SimpleNamespace(layout=Layout(sequence=4))
    worker.rollout_config = DiffusionRolloutConfig(share_samples=share_samples)
    with torch.no_grad():
        call(module, 3)
    worker.flop_meter._thread.shutdown(wait=True)
    DiffusionWorker._count_flops(worker, stage)
    assert worker.flops == {stage: 3 * 8.0 / part}


def test_what_cannot_be_counted_is_said(monkeypatch):
    module = transformer()
    meter = FlopMeter([module])
    monkeypatch.setattr("verl_omni.perf.flops.subprocess.run", lambda *a, **k: mock.Mock(returncode=1, stderr=b"no"))
    with torch.no_grad():
        call(module, 1)
    meter._thread.shutdown(wait=True)
    with pytest.warns(UserWarning, match="perf/mfu .* left out: the FLOPs of SD3Transformer2DModel"):
        assert meter.take() is None
    assert meter.take() is None
