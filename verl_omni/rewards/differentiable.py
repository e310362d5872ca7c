"""Rewards that are functions of pixels with a gradient: what direct reward gradients (`draft`) climb.

A function of your own becomes one by its decorator:

    from verl_omni.rewards.differentiable import differentiable

    @differentiable
    def compute_score(pixels):  # floats in [0, 1], images x 3 x height x width
        return pixels.mean(dim=(1, 2, 3))

It scores images like any other reward function, and asks for what belongs to them in the same way, by the names of its
parameters: `prompts`, `ground_truths`, `extra_infos`, `data_sources`, lists; or `prompt` and so on, with pixels of one
image. A scorer of `verl_omni.rewards` is one if it has `of_pixels`, which asks likewise.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_omni.rewards.choice import OWN, Choice, read_choices
from verl_omni.rewards.registry import default_settings, get_reward_fn, make_scorer, reward_names
from verl_omni.rewards.reward_function import BATCHED, SERVICES, SINGLE, TOLD, RewardFunction
from verl_omni.utils.secrets import revealed

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

#: of pixels, and of what is told of each image: `TOLD` by name
OfPixels = Callable[["torch.Tensor", Sequence[Mapping[str, Any]]], "torch.Tensor"]
TOLD_MANY = {f"{name}s": name for name in TOLD}


def differentiable(of_pixels: Callable[..., "torch.Tensor"]) -> Callable[..., Any]:
    """A reward function of a torch function: pixels (B, 3, H, W) in [0, 1] to scores (B,).

    Parameters with other names than `prompts` and its like are settings,
    `reward.custom_reward_function.reward_kwargs`.
    """
    import torch

    given, *others = inspect.signature(of_pixels).parameters.values()
    ones, lists = _asked(of_pixels)

    def score_one(solution_image: "torch.Tensor", **named: Any) -> float:
        with torch.no_grad():
            return float(of_pixels(solution_image[None].float(), **named))

    def score_each(solution_images: list, **named: Any) -> list[float]:
        each = {name: named.pop(name) for name in lists if name in named}
        return [  # one by one, as they may have several sizes
            score_one(image, **named, **{name: values[i : i + 1] for name, values in each.items()})
            for i, image in enumerate(solution_images)
        ]

    compute_score = functools.update_wrapper(score_one if ones else score_each, of_pixels)
    first = given.replace(name="solution_image" if ones else "solution_images", kind=given.POSITIONAL_OR_KEYWORD)
    told = sorted((p for p in others if p.name in (*ones, *lists)), key=lambda p: p.default is not p.empty)
    settings = [p.replace(kind=p.KEYWORD_ONLY) for p in others if p not in told]
    compute_score.__signature__ = inspect.Signature(
        [first, *(p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in told), *settings]
    )
    compute_score.of_pixels = of_pixels
    return compute_score


def told_by_name(of_pixels: Callable[..., "torch.Tensor"], settings: Mapping[str, Any] | None = None) -> OfPixels:
    """A function of pixels that is given what it asks for, by the names of its parameters, of what is told."""
    import torch

    ones, lists = _asked(of_pixels)
    settings = dict(settings or {})

    def together(pixels: "torch.Tensor", told: Sequence[Mapping[str, Any]]) -> "torch.Tensor":
        return of_pixels(pixels, **{n: [row[TOLD_MANY[n]] for row in told] for n in lists}, **settings)

    def one_by_one(pixels: "torch.Tensor", told: Sequence[Mapping[str, Any]]) -> "torch.Tensor":
        scores = [
            of_pixels(image[None], **{n: row[n] for n in ones}, **settings)
            for image, row in zip(pixels, told, strict=True)
        ]
        return torch.cat([torch.as_tensor(score).reshape(1) for score in scores])

    return one_by_one if ones else together


def _asked(of_pixels: Callable[..., "torch.Tensor"]) -> tuple[list[str], list[str]]:
    """What it asks for of one image at a time, and of many. What it is not told is refused."""
    names = list(inspect.signature(of_pixels).parameters)[1:]
    ones, lists = [n for n in names if n in TOLD], [n for n in names if n in TOLD_MANY]
    if ones and lists:
        raise ValueError(
            f"differentiable function {of_pixels.__name__} asks for {ones[0]}, of one image, and {lists[0]}, of many: "
            f"ask for {ones[0]}s, or for {TOLD_MANY[lists[0]]}"
        )
    for name in names:
        if name in (*SINGLE, *BATCHED, *SERVICES) and name not in (*ones, *lists):
            raise ValueError(
                f"differentiable function {of_pixels.__name__} asks for {name}: it has pixels, and may ask for "
                f"{', '.join(TOLD_MANY)}, or for these without the s"
            )
    return ones, lists


def check_differentiable(reward: "DictConfig") -> None:
    """The rewards of a run have a gradient, or one line says which has none and what to name instead."""
    for choice in _chosen(reward):
        if choice.name == OWN:
            _own(reward)
        elif not hasattr(get_reward_fn(choice.name), "of_pixels"):
            known = [name for name in reward_names() if hasattr(get_reward_fn(name), "of_pixels")]
            raise ValueError(
                f'the reward "{choice.name}" has no gradient, which actor_rollout_ref.model.algorithm=draft follows: '
                f"it scores pictures in 8 bits, or sounds; take {', '.join(known)}, or a function of your own with the "
                "decorator verl_omni.rewards.differentiable.differentiable"
            )


def reward_of_pixels(reward: "DictConfig", device: str) -> OfPixels:
    """The weighted sum of a run's rewards; models are loaded here, on `device`."""
    check_differentiable(reward)
    parts = [(choice.weight, _loaded(reward, choice, device)) for choice in _chosen(reward)]
    return lambda pixels, told: sum(weight * score(pixels, told).to(pixels.device) for weight, score in parts)


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
    function = RewardFunction.of(reward.custom_reward_function, reward.timeout)
    if not hasattr(function.function, "of_pixels"):
        raise ValueError(
            f"reward function {function.name} has no gradient, which actor_rollout_ref.model.algorithm=draft follows: "
            "write it in torch on pixels and give it the decorator verl_omni.rewards.differentiable.differentiable"
        )
    return told_by_name(function.function.of_pixels, function.kwargs)


def _loaded(reward: "DictConfig", choice: Choice, device: str) -> OfPixels:
    if choice.name == OWN:
        return _own(reward)
    settings, known = dict(choice.settings), get_reward_fn(choice.name)
    if not inspect.isclass(known):
        return told_by_name(known.of_pixels, revealed(settings, f"reward.scorers.{choice.label}"))
    if "device" in default_settings(choice.name) and settings.get("device") is None:
        settings["device"] = device
    return told_by_name(make_scorer(choice.name, settings).of_pixels)
