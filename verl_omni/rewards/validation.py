"""`reward.validation`: what scores the images of a validation, where that is not what training learns from."""

from typing import Any

from omegaconf import DictConfig

COLUMN = "validates"  # of a row that validation draws, in a run that has such rewards


def has_own(config: Any) -> bool:
    """Whether validation is scored by other rewards than training."""
    own = getattr(config.reward, "validation", None)
    return own is not None and (bool(own.scorers) or own.custom_reward_function.path is not None)


def for_validation(config: DictConfig) -> DictConfig:
    """The configuration as the rewards of validation read it: theirs in the place of training's, of single images."""
    if not has_own(config):
        return config
    config = config.copy()
    reward, own, function = config.reward, config.reward.validation, config.reward.validation.custom_reward_function
    reward.scorers, reward.pairwise.by, reward.pairwise.opponents = own.scorers, None, None
    taken = reward.custom_reward_function
    taken.path, taken.name, taken.reward_kwargs = function.path, function.name, function.reward_kwargs
    return config
