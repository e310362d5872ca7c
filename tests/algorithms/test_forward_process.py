"""What direct-preference training needs beside its losses: noise levels, pairs, advantages, the old policy's pace."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_omni.algorithms.forward_process import draw_sigmas, noised
from verl_omni.algorithms.old_policy import old_policy_decay
from verl_omni.config.algorithm import DiffusionAlgoConfig
from verl_omni.trainer.diffusion.diffusion_algos import (
    AWMLoss,
    DiffusionNFTLoss,
    DPOLoss,
    FlowGRPOLoss,
    compute_flow_grpo_outcome_advantage,
)


def rollouts(uids):
    from verl import DataProto

    return DataProto.from_dict(
        {"clean_latents": torch.arange(len(uids)).float()[:, None].expand(-1, 3).clone()},
        non_tensors={"uid": np.array(uids, dtype=object)},
    )


def trainer_config(**algorithm):
    return SimpleNamespace(algorithm=DiffusionAlgoConfig(**algorithm))


def test_noised_is_the_straight_line():
    x0, eps, t = torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.tensor([0.0, 0.25, 1.0])
    x_t = noised(x0, eps, t)
    torch.testing.assert_close(x_t[0], x0[0])
    torch.testing.assert_close(x_t[1], 0.75 * x0[1] + 0.25 * eps[1])
    torch.testing.assert_close(x_t[2], eps[2])


def test_drawn_noise_levels():
    g = torch.Generator().manual_seed(0)
    uniform = draw_sigmas(2000, 3, "uniform", g)
    assert uniform.shape == (2000, 3) and 0 < uniform.min() and uniform.max() <= 1
    assert abs(float(uniform.mean()) - 0.5) < 0.02 and abs(float(uniform.std()) - 12**-0.5) < 0.01
    logit = draw_sigmas(2000, 3, "logit_normal", g).logit()
    assert abs(float(logit.mean())) < 0.05 and abs(float(logit.std()) - 1) < 0.05
    schedule = torch.tensor([1.0, 0.8, 0.5, 0.2])
    steps = draw_sigmas(500, 3, "rollout", g, schedule)
    assert all(len(set(row)) == 3 for row in steps.tolist())
    values, counts = steps.unique(return_counts=True)
    assert values.tolist() == sorted(schedule.tolist()) and counts.min() > 300
    assert torch.equal(draw_sigmas(3, 2, "last", g, schedule), torch.tensor([[0.5, 0.2]] * 3))
    again = draw_sigmas(5, 2, "uniform", torch.Generator().manual_seed(4))
    assert torch.equal(again, draw_sigmas(5, 2, "uniform", torch.Generator().manual_seed(4)))
    with pytest.raises(ValueError, match="expected 1 to 4"):
        draw_sigmas(5, 5, "rollout", g, schedule)
    with pytest.raises(ValueError, match='did you mean "logit_normal"'):
        draw_sigmas(5, 5, "logitnormal", g)


def test_online_dpo_pairs_best_with_worst_and_counts_groups_without_a_pair():
    uids = ["a", "b", "a", "c", "b", "a", "c", "b"]
    rewards = torch.tensor([0.1, 0.5, 0.9, 0.3, 0.5, 0.4, 0.2, 0.5])  # all of b are equal
    batch = DPOLoss.prepare_actor_batch(rollouts(uids), rewards[:, None], trainer_config())
    assert batch.non_tensor_batch["uid"].tolist() == ["a", "a", "c", "c"]
    assert batch.batch["clean_latents"][:, 0].tolist() == [2.0, 0.0, 3.0, 6.0]
    assert batch.batch["preference"].tolist() == [1.0, -1.0, 1.0, -1.0]
    assert batch.meta_info["metrics"] == {"dpo/pairs": 2, "dpo/groups_without_pair": 1}


def test_online_dpo_without_any_difference_makes_no_pair():
    batch = DPOLoss.prepare_actor_batch(rollouts(["a", "a"]), torch.ones(2), trainer_config())
    assert len(batch) == 0 and batch.meta_info["metrics"] == {"dpo/pairs": 0, "dpo/groups_without_pair": 1}


def test_a_reward_that_is_no_number_makes_no_pair_silently():
    with pytest.raises(ValueError, match="reward of image 1"):
        DPOLoss.prepare_actor_batch(rollouts(["a", "a"]), torch.tensor([0.0, float("nan")]), trainer_config())


@pytest.mark.parametrize("loss", [DiffusionNFTLoss, AWMLoss])
def test_online_losses_get_group_advantages(loss):
    uids, rewards = ["a", "b", "a", "b"], torch.tensor([0.0, 1.0, 4.0, 2.0])
    expected, _ = compute_flow_grpo_outcome_advantage(rewards, np.array(uids), global_std=False)
    batch = loss.prepare_actor_batch(rollouts(uids), rewards[:, None], trainer_config(global_std=False))
    torch.testing.assert_close(batch.batch["advantages"], expected)
    signs = loss.prepare_actor_batch(rollouts(uids), rewards, trainer_config(adv_mode="binary"))
    assert signs.batch["advantages"].tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_policy_gradient_losses_leave_the_batch_alone():
    batch = rollouts(["a"])
    assert FlowGRPOLoss.prepare_actor_batch(batch, torch.zeros(1), None) is batch


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("copy", {0: 0.0, 10: 0.0, 10_000: 0.0}),
        ("linear_to_0_5", {0: 0.0, 100: 0.1, 500: 0.5, 10_000: 0.5}),
        ("delayed_linear_to_0_999", {0: 0.0, 74: 0.0, 75: 0.0, 85: 0.075, 208: 0.9975, 209: 0.999}),
        ("constant_0_9", {1: 0.9, 500: 0.9}),
        ("linear_to_0_3", {0: 0.0, 50: 0.05, 300: 0.3, 400: 0.3}),
    ],
)
def test_published_paces_of_the_old_policy(schedule, expected):
    assert {step: old_policy_decay(step, schedule) for step in expected} == pytest.approx(expected)


def test_a_fixed_pace_comes_first_and_wrong_ones_are_named():
    assert old_policy_decay(7, "copy", decay=0.9) == 0.9
    with pytest.raises(ValueError, match="from 0 to 1"):
        old_policy_decay(0, decay=1.5)
    with pytest.raises(ValueError, match='did you mean "linear_to_0_5"'):
        old_policy_decay(0, "linear_0_5")
