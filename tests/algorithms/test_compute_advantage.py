"""From a scored batch to advantages, as the trainer calls it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.protocol import DataProto

from verl_omni.algorithms.forward_process import add_advantages
from verl_omni.config.algorithm import DiffusionAlgoConfig
from verl_omni.trainer.diffusion.policy_gradient_trainer import compute_advantage

SHARP, BRIGHT = [1.0, 3.0, 2.0, 6.0], [100.0, 300.0, -50.0, -70.0]


def scored() -> DataProto:
    """Two prompts with two images each, three trained steps."""
    return DataProto.from_dict(
        tensors={"sample_level_rewards": torch.tensor([0.0, 1.0, 1.0, 0.0]), "all_timesteps": torch.zeros(4, 3)},
        non_tensors={
            "uid": np.array(["a", "a", "b", "b"], dtype=object),
            "reward_extra_info": np.array([{"sharp": s, "bright": b} for s, b in zip(SHARP, BRIGHT, strict=True)]),
        },
    )


def test_group_advantages_are_the_same_for_every_step():
    batch = compute_advantage(scored(), "flow_grpo", global_std=False).batch
    value = 0.5 / (0.5**0.5 + 1e-4)
    expected = torch.tensor([-value, value, value, -value])[:, None].expand(4, 3)
    torch.testing.assert_close(batch["advantages"], expected)


def test_gdpo_weighs_the_rewards_that_the_function_returned():
    """Of two values, the standardised ones are ±1/√2, whatever their scale: 2·(±) + 1·(±), then over the batch."""
    config = DiffusionAlgoConfig(adv_estimator="gdpo", reward_weights={"sharp": 2.0, "bright": 1.0})
    batch = compute_advantage(scored(), "gdpo", config=config).batch
    total = np.array([-3.0, 3.0, -1.0, 1.0]) / np.sqrt(2)
    expected = total / (total.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(batch["advantages"][:, 0].numpy(), expected, rtol=1e-5)
    final = add_advantages(scored(), torch.zeros(4), SimpleNamespace(algorithm=config)).batch
    np.testing.assert_allclose(final["advantages"].numpy(), expected, rtol=1e-5)


def test_gdpo_can_use_the_main_score():
    config = DiffusionAlgoConfig(adv_estimator="gdpo", reward_weights={"score": 1.0})
    batch = compute_advantage(scored(), "gdpo", config=config).batch
    assert torch.equal(batch["advantages"][:, 0].sign(), torch.tensor([-1.0, 1.0, 1.0, -1.0]))


def test_an_unknown_reward_is_named():
    config = DiffusionAlgoConfig(adv_estimator="gdpo", reward_weights={"sharpe": 1.0})
    with pytest.raises(ValueError, match='"sharpe".*did you mean "sharp"'):
        compute_advantage(scored(), "gdpo", config=config)


@pytest.mark.parametrize("told", [None, "very"])
def test_a_reward_that_one_image_has_no_number_for_is_named(told):
    batch, config = scored(), DiffusionAlgoConfig(adv_estimator="gdpo", reward_weights={"sharp": 1.0})
    batch.non_tensor_batch["reward_extra_info"][2] = {"sharp": told}
    with pytest.raises(ValueError, match=f'"sharp", and the reward function gave an image {told!r}'):
        compute_advantage(batch, "gdpo", config=config)
