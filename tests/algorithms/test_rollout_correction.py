"""Weights and rejection against the formulas, with ratios that are known."""

import math

import pytest
import torch

from verl_omni.algorithms.rollout_correction import REJECTIONS, check_correction, correction_weights
from verl_omni.config.algorithm import RolloutCorrectionConfig

# log p_train - log p_rollout of three samples with three steps: near, one step far off, far beyond any bound
LR = torch.tensor([[0.0, 0.1, -0.1], [0.5, 1.5, -0.5], [30.0, 0.0, -30.0]], dtype=torch.float64)
ROLLOUT = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64).expand(3, 3)


def weights(**settings):
    return correction_weights(ROLLOUT + LR, ROLLOUT, RolloutCorrectionConfig(**settings))[0]


def test_a_steps_weight_is_its_ratio_up_to_the_threshold():
    ratio = LR.clamp(-20, 20).exp()
    torch.testing.assert_close(weights(rollout_is="step"), ratio.clamp(max=2.0))
    torch.testing.assert_close(weights(rollout_is="step", rollout_is_threshold=5.0), ratio.clamp(max=5.0))


def test_a_sequences_weight_is_the_product_of_its_steps():
    expected = LR.sum(1).clamp(-20, 20).exp().clamp(max=2.0)[:, None].expand(3, 3)
    torch.testing.assert_close(weights(rollout_is="sequence"), expected)


def test_normalised_weights_have_mean_one():
    found = weights(rollout_is="step", rollout_is_batch_normalize=True)
    torch.testing.assert_close(found.mean(), torch.tensor(1.0, dtype=torch.float64))
    capped = LR.clamp(-20, 20).exp().clamp(max=2.0)
    torch.testing.assert_close(found, capped / capped.mean())


DIVERGENCE = {"k1": -LR.clamp(-20, 20), "k2": LR.clamp(-20, 20) ** 2 / 2}
DIVERGENCE["k3"] = LR.clamp(-20, 20).exp() - 1 - LR.clamp(-20, 20)
OVER = {"sum": lambda x: x.sum(1), "mean": lambda x: x.mean(1), "max": lambda x: x.max(1).values}


@pytest.mark.parametrize("name", REJECTIONS)
def test_what_is_rejected_has_no_weight(name):
    level, kind = name.rsplit("_", 1)
    stat = DIVERGENCE[kind]
    if level != "step":
        stat = OVER[level.removeprefix("seq_")](stat)[:, None].expand(3, 3)
    bound = math.log(1.2) if kind == "k1" else 0.1
    kept = (stat.abs() <= bound) if kind == "k1" else (stat <= bound)
    found = weights(rollout_rs=name, rollout_rs_threshold=1.2 if kind == "k1" else 0.1)
    assert torch.equal(found, kept.double()) and 0 < kept.sum() < 9
    both = weights(rollout_is="step", rollout_rs=name, rollout_rs_threshold=1.2 if kind == "k1" else 0.1)
    torch.testing.assert_close(both, kept * LR.clamp(-20, 20).exp().clamp(max=2.0))


def test_bounds_of_both_sides():
    found = weights(rollout_rs="step_k1", rollout_rs_threshold=[0.5, 1.2])
    assert torch.equal(found, ((-LR >= math.log(0.5)) & (-LR <= math.log(1.2))).double())


def test_the_metrics_have_verls_names():
    config = RolloutCorrectionConfig(rollout_is="step")
    _, metrics = correction_weights(ROLLOUT[:2] + LR[:2], ROLLOUT[:2], config)
    assert metrics["rollout_corr/kl"] == pytest.approx(-LR[:2].mean().item())
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((LR[:2].exp() - 1 - LR[:2]).mean().item())
    assert "rollout_corr/rollout_is_mean" in metrics


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rollout_rs": "step_k9", "rollout_rs_threshold": 1.0}, 'did you mean "step_k'),
        ({"rollout_rs": "step_k1"}, "needs algorithm.rollout_correction.rollout_rs_threshold"),
        ({"rollout_rs": "step_k1", "rollout_rs_threshold": [2.0, 1.0]}, "lower <= upper"),
        ({"rollout_is": "step", "bypass_mode": True}, "leave out rollout_is and rollout_rs, or bypass_mode"),
    ],
)
def test_what_cannot_be_computed_is_refused(settings, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        check_correction(RolloutCorrectionConfig(**settings))
