"""Group advantages against numpy, in float64."""

import numpy as np
import pytest
import torch

from verl_omni.algorithms.advantages import apply_adv_mode
from verl_omni.algorithms.registry import estimate_advantages
from verl_omni.config.algorithm import DiffusionAlgoConfig
from verl_omni.config.knob import check_ranges
from verl_omni.trainer.diffusion.diffusion_algos import (
    compute_flow_grpo_outcome_advantage,
    compute_gdpo_outcome_advantage,
)

INDEX = np.array(["b", "a", "b", "c", "a", "b", "a", "d", "d"], dtype=object)  # c is a group of one
REWARDS = np.array([0.1, 0.9, 0.4, 5.0, 0.3, 0.7, 0.2, 0.6, 0.6])  # d has equal rewards


def expected(rewards, global_std, norm, ddof=1):
    out = np.zeros_like(rewards)
    for group in set(INDEX):
        rows = INDEX == group
        out[rows] = rewards[rows] - rewards[rows].mean()
        if norm:
            std = rewards.std(ddof=ddof) if global_std else rewards[rows].std(ddof=ddof) if rows.sum() > 1 else 0.0
            out[rows] /= std + 1e-4
    return torch.from_numpy(out).float()


@pytest.mark.parametrize("global_std", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_flow_grpo_advantage(global_std, norm):
    rewards = torch.from_numpy(REWARDS).float()
    advantages, returns = compute_flow_grpo_outcome_advantage(
        rewards, INDEX, norm_adv_by_std_in_grpo=norm, global_std=global_std
    )
    torch.testing.assert_close(advantages, expected(REWARDS, global_std, norm), rtol=1e-5, atol=1e-6)
    assert torch.equal(advantages, returns) and advantages.shape == rewards.shape
    assert advantages[3] == 0 and not advantages[7:].any()
    # over steps: each column by itself
    two = torch.stack([rewards, 2 * rewards], dim=1)
    columns, _ = compute_flow_grpo_outcome_advantage(two, INDEX, norm_adv_by_std_in_grpo=norm, global_std=global_std)
    torch.testing.assert_close(columns[:, 0], advantages)
    torch.testing.assert_close(columns[:, 1], expected(2 * REWARDS, global_std, norm), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("global_std", [True, False])
def test_the_ddof_of_the_standard_deviation_is_a_setting(global_std):
    """flow_grpo's own code divides by np.std."""
    rewards, config = torch.from_numpy(REWARDS).float(), DiffusionAlgoConfig(adv_std_ddof=0)
    advantages, _ = compute_flow_grpo_outcome_advantage(rewards, INDEX, global_std=global_std, config=config)
    torch.testing.assert_close(advantages, expected(REWARDS, global_std, True, ddof=0), rtol=1e-5, atol=1e-6)
    assert advantages[3] == 0
    gdpo, _ = estimate_advantages("gdpo", index=INDEX, sample_level_reward_components={"x": rewards}, config=config)
    torch.testing.assert_close(gdpo, gdpo_expected([REWARDS], [1], ddof=0), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="adv_std_ddof=2: expected 0 or more, at most 1"):
        check_ranges(DiffusionAlgoConfig(adv_std_ddof=2))


def test_a_batch_of_one_image_has_advantage_zero():
    for global_std in (True, False):
        advantages, _ = compute_flow_grpo_outcome_advantage(torch.tensor([0.7]), np.array(["a"]), global_std=global_std)
        assert advantages.tolist() == [0.0]


def test_epsilon_is_added_to_the_std():
    advantages, _ = compute_flow_grpo_outcome_advantage(
        torch.tensor([0.0, 2.0]), np.array([7, 7]), epsilon=1.0, global_std=False
    )
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0]) / (np.sqrt(2) + 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_never_a_silent_zero(bad):
    rewards = torch.from_numpy(REWARDS).float()
    rewards[4] = bad
    for call in (
        lambda: compute_flow_grpo_outcome_advantage(rewards, INDEX),
        lambda: compute_gdpo_outcome_advantage(INDEX, {"x": rewards}),
    ):
        with pytest.raises(ValueError, match=f'reward of image 4 .prompt "a". is {bad}'):
            call()
    with pytest.raises(ValueError, match="8 rewards for 9 images"):
        compute_flow_grpo_outcome_advantage(rewards[:8], INDEX)


def gdpo_expected(components, weights, ddof=1):
    total = np.zeros(len(INDEX))
    for rewards, weight in zip(components, weights, strict=True):
        for group in set(INDEX):
            rows = INDEX == group
            std = rewards[rows].std(ddof=ddof) if rows.sum() > 1 else 0.0
            total[rows] += weight * (rewards[rows] - rewards[rows].mean()) / max(std, 1e-6)
    return torch.from_numpy((total - total.mean()) / (total.std(ddof=ddof) + 1e-4)).float()


def test_gdpo_standardises_each_reward_before_adding():
    clip, ocr = REWARDS, 100 * np.random.default_rng(0).random(len(REWARDS))
    tensors = {"clip": torch.from_numpy(clip), "ocr": torch.from_numpy(ocr)}
    by_name, _ = compute_gdpo_outcome_advantage(INDEX, tensors, {"ocr": 2.0, "clip": 0.5})
    torch.testing.assert_close(by_name, gdpo_expected([clip, ocr], [0.5, 2.0]), rtol=1e-4, atol=1e-4)
    matrix = torch.stack(list(tensors.values()), dim=1)
    by_column, _ = compute_gdpo_outcome_advantage(INDEX, matrix, [0.5, 2.0])
    torch.testing.assert_close(by_column, by_name)
    plain, _ = compute_gdpo_outcome_advantage(INDEX, matrix)
    torch.testing.assert_close(plain, gdpo_expected([clip, ocr], [1, 1]), rtol=1e-4, atol=1e-4)
    # the scale of a reward does not matter, which is the point
    scaled, _ = compute_gdpo_outcome_advantage(INDEX, matrix * torch.tensor([1000.0, 1.0]))
    torch.testing.assert_close(scaled, plain, rtol=1e-3, atol=1e-3)


def test_gdpo_says_what_it_lacks():
    with pytest.raises(ValueError, match="gdpo needs several rewards"):
        estimate_advantages("gdpo", sample_level_rewards=torch.zeros(9), index=INDEX, global_std=True, config=None)
    with pytest.raises(ValueError, match=r"weights are given for \['ocrr'\], rewards for \['ocr'\]"):
        compute_gdpo_outcome_advantage(INDEX, {"ocr": torch.zeros(9)}, {"ocrr": 1.0})


def test_adv_modes():
    a = torch.tensor([-2.0, 0.0, 0.5])
    assert apply_adv_mode(a, "continuous").tolist() == [-2.0, 0.0, 0.5]
    assert apply_adv_mode(a, "positive_only").tolist() == [0.0, 0.0, 0.5]
    assert apply_adv_mode(a, "negative_only").tolist() == [-2.0, 0.0, 0.0]
    assert apply_adv_mode(a, "one_only").tolist() == [0.0, 0.0, 1.0]
    assert apply_adv_mode(a, "binary").tolist() == [-1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match='unknown algorithm.adv_mode "binry": did you mean "binary"'):
        apply_adv_mode(a, "binry")
