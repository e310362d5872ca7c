"""The rewards that a dataset's ``data_source`` column can name."""

from collections.abc import Callable
from typing import Any

from verl_omni.utils.registry import Registry

RewardFn = Callable[..., list[dict[str, Any]]]

_REWARDS: Registry[RewardFn] = Registry("reward (data_source)")


def register_reward(name: str) -> Callable[[RewardFn], RewardFn]:
    """Make a reward function available to rows whose ``data_source`` is ``name``.

    A reward function scores a batch:

        def compute_score(images: list, ground_truths: list[str], prompts: list[str],
                          extra_infos: list[dict]) -> list[dict]

    and returns, in the order of the images, one dict each with a number under "score"; further entries are logged.
    """

    def decorator(reward: RewardFn) -> RewardFn:
        _REWARDS.add(name, reward)
        return reward

    return decorator


def get_reward_fn(name: str) -> RewardFn:
    """The reward function registered under ``name``."""
    return _REWARDS.get(name)
