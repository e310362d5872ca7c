"""Rewards that are functions of pixels with a gradient: what direct reward gradients (`draft`) climb.

A function of your own becomes one by its decorator:

    from verl_omni.rewards.differentiable import differentiable

    @differentiable
    def compute_score(pixels):  # floats in [0, 1], images x 3 x height x width
        return pixels.mean(dim=(1, 2, 3))

It scores images like any other reward function. A scorer of `verl_omni.rewards` is one if it has `of_pixels`.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl_omni.rewards.choice import OWN, Choice, read_choices
from verl_omni.rewards.registry import get_reward_fn, reward_names

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

OfPixels = Callable[["torch.Tensor"], "torch.Tensor"]


def differentiable(of_pixels: Callable[..., "torch.Tensor"]) -> Callable[..., list[float]]:
    """A reward function of a torch function: pixels (B, 3, H, W) in [0, 1] to scores (B,).

    Its keyword-only parameters are settings, `reward.custom_reward_function.reward_kwargs`.
    """
    import torch

    def compute_score(solution_images: list, **settings: Any) -> list[float]:
        with torch.no_grad():
            return [float(of_pixels(image[None].float(), **settings)) for image in solution_images]

    given, *settings = inspect.signature(of_pixels).parameters.values()
    first = given.replace(name="solution_images", kind=given.POSITIONAL_OR_KEYWORD, annotation=list)
    compute_score.__signature__ = inspect.Signature([first, *(p.replace(kind=p.KEYWORD_ONLY) for p in settings)])
    compute_score.__name__, compute_score.__doc__ = of_pixels.__name__, of_pixels.__doc__
    compute_score.of_pixels = of_pixels
    return compute_score


def check_differentiable(reward: "DictConfig") -> None:
    """The rewards of a run have a gradient, or one line says which has none and what to name instead."""
    for choice in _chosen(reward):
        if choice.name == OWN:
            _own(reward)
        elif not hasattr(get_reward_fn(choice.name), "of_pixels"):
            known = [name for name in reward_names() if hasattr(get_reward_fn(name), "of_pixels")]
            raise ValueError(
                f'the reward "{choice.name}" has no gradient, which actor_rollout_ref.model.algorithm=draft follows: '
                f"take {' or '.join(known)}, or a function of your own with the decorator "
                "verl_omni.rewards.differentiable.differentiable"
            )


def reward_of_pixels(reward: "DictConfig", device: str) -> OfPixels:
    """The weighted sum of a run's rewards; models are loaded here, on `device`."""
    check_differentiable(reward)
    parts = [(choice.weight, _loaded(reward, choice, device)) for choice in _chosen(reward)]
    return lambda pixels: sum(weight * score(pixels) for weight, score in parts)


def _chosen(reward: "DictConfig") -> list[Choice]:
    """Those that are added up, named in the configuration: a row's data_source may name another for each row."""
    from omegaconf import OmegaConf

    choices = read_choices(OmegaConf.to_container(reward.scorers, resolve=True) if reward.scorers else None)
    chosen = [choice for choice in choices.values() if choice.weight is not None]
    if not chosen and reward.custom_reward_function.path:
        chosen = [Choice(OWN, OWN, 1.0)]
    if not chosen:
        raise ValueError(
            "actor_rollout_ref.model.algorithm=draft follows one reward for all prompts: name it, "
            "'reward.scorers=[{name: aesthetic}]' or reward.custom_reward_function.path=FILE.py"
        )
    for choice in chosen:
        for given in ("gate", "data_sources"):
            if getattr(choice, given) is not None:
                raise ValueError(
                    f"reward.scorers.{choice.label}.{given} has no gradient, which "
                    "actor_rollout_ref.model.algorithm=draft follows: leave it out"
                )
    return chosen


def _own(reward: "DictConfig") -> OfPixels:
    from functools import partial

    from verl_omni.rewards.reward_function import RewardFunction

    function = RewardFunction.of(reward.custom_reward_function, reward.timeout)
    if not hasattr(function.function, "of_pixels"):
        raise ValueError(
            f"reward function {function.name} has no gradient, which actor_rollout_ref.model.algorithm=draft follows: "
            "write it in torch on pixels and give it the decorator verl_omni.rewards.differentiable.differentiable"
        )
    return partial(function.function.of_pixels, **function.kwargs)


def _loaded(reward: "DictConfig", choice: Choice, device: str) -> OfPixels:
    from verl_omni.rewards.registry import make_scorer

    if choice.name == OWN:
        return _own(reward)
    settings = dict(choice.settings)
    if settings.get("device") is None:
        settings["device"] = device
    return make_scorer(choice.name, settings).of_pixels
