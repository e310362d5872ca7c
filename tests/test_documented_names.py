"""Functions that the documentation offers to callers, called as it says."""

import numpy as np
import pytest
import torch
from verl.protocol import DataProto

from verl_omni.trainer.diffusion.diffusion_algos import FlowGRPOLoss
from verl_omni.trainer.diffusion.diffusion_metric_utils import compute_data_metrics_diffusion
from verl_omni.workers.config import DiffusionActorConfig, DiffusionLossConfig
from verl_omni.workers.losses import build_loss_function


def test_data_metrics_of_the_smallest_batch():
    """Rewards alone, one an image."""
    metrics = compute_data_metrics_diffusion(
        DataProto.from_dict({"sample_level_rewards": torch.tensor([0.25, 0.5, 0.75])})
    )
    assert metrics == {"critic/rewards/mean": 0.5, "critic/rewards/max": 0.75, "critic/rewards/min": 0.25}


def test_data_metrics_of_a_batch_over_timesteps():
    """Rewards (B, T): an image's is the mean over its steps; advantages and returns are taken element by element."""
    rewards = torch.tensor([[0.0, 1.0], [1.0, 2.0], [3.0, 3.0]])
    metrics = compute_data_metrics_diffusion(
        DataProto.from_dict(
            {"sample_level_rewards": rewards, "advantages": rewards - 1, "returns": rewards},
            {"uid": np.array(["a", "a", "b"], dtype=object)},
        )
    )
    assert metrics["critic/rewards/mean"] == pytest.approx((0.5 + 1.5 + 3) / 3)
    assert (metrics["critic/rewards/min"], metrics["critic/rewards/max"]) == (0.5, 3.0)
    assert metrics["critic/rewards/std_mean"] == pytest.approx(np.std([0.5, 1.5], ddof=1) / 2)
    assert (metrics["critic/rewards/zero_std_ratio"], metrics["critic/rewards/group_size"]) == (0.5, 1.5)
    assert (metrics["critic/advantages/min"], metrics["critic/returns/max"]) == (-1.0, 3.0)


@pytest.mark.parametrize("expected", [KeyError, ValueError])
def test_a_missing_input_is_both_errors_and_one_line(expected):
    with pytest.raises(expected) as caught:
        FlowGRPOLoss().validate_inputs(
            loss_name="flow_grpo", model_output={"log_probs": torch.zeros(1)}, data={"advantages": torch.zeros(1)}
        )
    assert str(caught.value) == 'loss "flow_grpo" needs old_log_probs in its data, which holds: advantages'


def test_a_metric_that_is_named_with_its_prefix_has_it_once(monkeypatch):
    told = (torch.tensor(0.5), {"actor/x": 1.0, "y": 2.0})
    monkeypatch.setattr(FlowGRPOLoss, "compute_loss", staticmethod(lambda **inputs: told))
    loss = build_loss_function(DiffusionActorConfig(diffusion_loss=DiffusionLossConfig("flow_grpo")))
    rows = {"log_probs": torch.zeros(1)}
    result = loss(rows, {"old_log_probs": torch.zeros(1), "advantages": torch.zeros(1)})
    assert result.metrics == {"x": 1.0, "y": 2.0, "loss": torch.tensor(0.5)}
