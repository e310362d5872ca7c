"""A group whose rewards are all equal teaches nothing: its advantage is 0, not nearly 0, and so is every gradient."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from loss_cases import direct_preference_case, policy_gradient_case

from verl_omni.algorithms.advantages import ADV_MODES, apply_adv_mode
from verl_omni.algorithms.registry import DiffusionAdvantageEstimator, estimate_advantages
from verl_omni.config.algorithm import DiffusionAlgoConfig

GROUPS = 20_000
# estimator, normalised by a standard deviation, the batch's or the group's, its ddof
SETTINGS = list(itertools.product(list(DiffusionAdvantageEstimator), (True, False), (True, False), (0, 1)))


def estimated(estimator, rewards, index, norm=True, global_std=True, ddof=1, **components):
    """Advantages of rewards, which are also the components of an estimator of several."""
    columns = rewards.reshape(len(rewards), -1).unbind(dim=1)
    return estimate_advantages(
        estimator,
        sample_level_rewards=rewards,
        index=index,
        norm_adv_by_std_in_grpo=norm,
        global_std=global_std,
        config=DiffusionAlgoConfig(adv_std_ddof=ddof),
        sample_level_reward_components=components or {f"r{i}": column for i, column in enumerate(columns)},
    )[0]


@pytest.fixture(scope="module")
def equal_groups():
    """(rewards, prompts) of 20,000 groups of 1 to 24 images: all rewards of a group are one number, of any size."""
    rng = np.random.default_rng(0)
    size = rng.integers(1, 25, GROUPS)
    scale = 10.0 ** rng.integers(-6, 7, GROUPS)
    index = np.repeat(np.arange(GROUPS), size)
    rewards = torch.from_numpy(rng.normal(size=GROUPS) * scale).float()[index]
    order = rng.permutation(len(index))
    return rewards[order], index[order]


@pytest.mark.parametrize(("estimator", "norm", "global_std", "ddof"), SETTINGS)
def test_equal_rewards_have_no_advantage(equal_groups, estimator, norm, global_std, ddof):
    rewards, index = equal_groups
    for given in (rewards, torch.stack([rewards, rewards + 0.7], dim=1)):
        advantages = estimated(estimator, given, index, norm, global_std, ddof)
        assert advantages.dtype == torch.float32 and len(advantages) == len(rewards)
        for mode in ADV_MODES:
            assert not apply_adv_mode(advantages, mode).any()


@pytest.mark.parametrize(("estimator", "norm", "global_std", "ddof"), SETTINGS)
def test_a_batch_of_one_number_has_no_advantage(estimator, norm, global_std, ddof):
    for value, size in itertools.product((0.7, 0.1, 1 / 3, 1e-3, 23.4), (2, 3, 7, 16, 24)):
        rewards = torch.full((2 * size,), value)
        advantages = estimated(estimator, rewards, np.arange(2).repeat(size), norm, global_std, ddof)
        assert not advantages.any(), (value, size)


@pytest.mark.parametrize(("estimator", "norm", "global_std", "ddof"), SETTINGS)
def test_beside_groups_that_teach(equal_groups, estimator, norm, global_std, ddof):
    """Neither does a group of equal rewards get anything from the others."""
    _, index = equal_groups
    teaching = index % 2 == 0
    rewards = np.where(teaching, np.random.default_rng(1).random(len(index)), 0.7)
    advantages = estimated(estimator, torch.from_numpy(rewards).float(), index, norm, global_std, ddof)
    assert advantages[teaching].any()
    for mode in ADV_MODES:
        assert not apply_adv_mode(advantages, mode)[~teaching].any()


def test_a_reward_that_is_equal_within_each_prompt_adds_nothing(equal_groups):
    constant, index = equal_groups
    other = torch.from_numpy(np.random.default_rng(2).random(len(index))).float()
    alone = estimated("gdpo", other, index, other=other)
    assert alone.any() and torch.equal(estimated("gdpo", other, index, constant=constant, other=other), alone)


@pytest.mark.parametrize(
    "loss",
    ["flow_grpo", "grpo_guard", "flow_dppo", "tempflow_grpo", "flash_grpo", "awm", "diffusion_nft", "dgpo", "crd"],
)
@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0])
def test_no_advantage_is_no_gradient(loss, beta):
    """In float32, as training is. NFT pulls to the old policy where it has left it: there it is looked at on it."""
    if loss in ("dgpo", "crd"):
        case = direct_preference_case(loss, extra={"beta": beta})
    elif loss in ("awm", "diffusion_nft"):
        extra = {"kl_beta": 0.0} | ({"beta": beta} if loss == "diffusion_nft" else {})
        case = direct_preference_case(loss, extra=extra)
    else:
        case = policy_gradient_case(loss)
    output = {name: value.detach().float().requires_grad_() for name, value in case.model_output.items()}
    data = {name: value.float() for name, value in case.data.items()} | {"advantages": torch.zeros(12)}
    if loss == "crd":
        data |= {"targets": torch.zeros(12, 1), "group_sums": torch.zeros(12, 1)}
    if loss in ("diffusion_nft", "crd"):
        data["old_velocity"] = output["velocity"].detach().clone()
    case = dataclasses.replace(case, model_output=output, data=data)
    assert not any(gradient.any() for gradient in case.gradients(case.run().loss))
