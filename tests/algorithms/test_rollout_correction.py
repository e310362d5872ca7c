"""Weights and rejection against the formulas, with ratios that are known."""

import math

import pytest
import torch

from verl_omni.algorithms.rollout_correction import REJECTIONS, check_correction, correct
from verl_omni.config.algorithm import RolloutCorrectionConfig

# log p_train - log p_rollout of three samples with three steps: near, one step far off, far beyond any bound
LR = torch.tensor([[0.0, 0.1, -0.1], [0.5, 1.5, -0.5], [30.0, 0.0, -30.0]], dtype=torch.float64)
ROLLOUT = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64).expand(3, 3)


def corrected(**settings):
    return correct(ROLLOUT + LR, ROLLOUT, RolloutCorrectionConfig(**settings))


def weights(**settings):
    return corrected(**settings).weights


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
def test_what_is_rejected(name):
    level, kind = name.rsplit("_", 1)
    stat = DIVERGENCE[kind]
    if level not in ("step", "token"):
        stat = OVER[level.removeprefix("seq_")](stat)[:, None].expand(3, 3)
    bound = math.log(1.2) if kind == "k1" else 0.1
    kept = (stat.abs() <= bound) if kind == "k1" else (stat <= bound)
    settings = {"rollout_rs": name, "rollout_rs_threshold": 1.2 if kind == "k1" else 0.1}
    alone, both = corrected(**settings), corrected(rollout_is="step", **settings)
    assert alone.weights is None and torch.equal(alone.kept, kept) and 0 < kept.sum() < 9
    assert torch.equal(both.kept, kept)
    torch.testing.assert_close(both.weights, LR.clamp(-20, 20).exp().clamp(max=2.0))


@pytest.mark.parametrize("bounds", [[0.5, 1.2], "0.5_1.2"])
def test_bounds_of_both_sides(bounds):
    found = corrected(rollout_rs="step_k1", rollout_rs_threshold=bounds).kept
    assert torch.equal(found, (-LR >= math.log(0.5)) & (-LR <= math.log(1.2)))
    ratio = LR.clamp(-20, 20).exp()
    within = torch.where((ratio >= 0.5) & (ratio <= 1.2), ratio, 0)
    torch.testing.assert_close(weights(rollout_is="step", rollout_is_threshold=bounds), within)


def test_a_token_is_a_step():
    assert torch.equal(weights(rollout_is="token"), weights(rollout_is="step"))
    bounds = {"rollout_rs_threshold": "0.5_2.0"}
    named = [corrected(rollout_rs=f"{level}_k1,seq_mean_k1", **bounds).kept for level in ("token", "step")]
    assert torch.equal(*named)


def test_the_metrics_have_verls_names():
    config = RolloutCorrectionConfig(rollout_is="step")
    metrics = correct(ROLLOUT[:2] + LR[:2], ROLLOUT[:2], config).metrics
    assert metrics["rollout_corr/kl"] == pytest.approx(-LR[:2].mean().item())
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((LR[:2].exp() - 1 - LR[:2]).mean().item())
    assert "rollout_corr/rollout_is_mean" in metrics


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rollout_rs": "step_k9", "rollout_rs_threshold": 1.0}, 'did you mean "step_k'),
        ({"rollout_rs": "step_k1"}, "needs algorithm.rollout_correction.rollout_rs_threshold"),
        ({"rollout_rs": "step_k1", "rollout_rs_threshold": [2.0, 1.0]}, "lower <= upper"),
        ({"rollout_rs": "seq_max_k2", "rollout_rs_threshold": "0.5_2.0"}, "threshold=0.5_2.0: .*upper bound"),
        ({"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, "rollout_is_threshold=5_0.5: .*lower bound"),
    ],
)
def test_what_cannot_be_computed_is_refused(settings, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        check_correction(RolloutCorrectionConfig(**settings))
