"""The rewards that a dataset's ``data_source`` column can name."""

from collections.abc import Callable
from typing import Any

from verl_omni.utils.suggest import unknown

RewardFn = Callable[..., list[dict[str, Any]]]

_REWARDS: dict[str, RewardFn] = {}


def register_reward(name: str) -> Callable[[RewardFn], RewardFn]:
    """Make a reward function available to rows whose ``data_source`` is ``name``.

    A reward function scores a batch:

        def compute_score(images: list, ground_truths: list[str], prompts: list[str],
                          extra_infos: list[dict]) -> list[dict]

    and returns, in the order of the images, one dict each with a number under "score"; further entries are logged.
    """

    def decorator(reward: RewardFn) -> RewardFn:
        if name in _REWARDS and _REWARDS[name] is not reward:
            raise ValueError(
                f'reward "{name}" is registered already, by {_REWARDS[name].__module__}: choose another name'
            )
        _REWARDS[name] = reward
        return reward

    return decorator


def get_reward_fn(name: str) -> RewardFn:
    """The reward function registered under ``name``."""
    if name not in _REWARDS:
        raise ValueError(unknown("reward (data_source)", name, _REWARDS))
    return _REWARDS[name]
