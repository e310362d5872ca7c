"""Rewards: from image, prompt and ground truth to a score, chosen by the ``data_source`` of a row."""

from typing import Any

from verl_omni.rewards.registry import (
    check_package,
    check_settings,
    get_reward_fn,
    make_scorer,
    register_reward,
    reward_names,
)

__all__ = [
    "check_package",
    "check_settings",
    "default_compute_score_image",
    "get_reward_fn",
    "make_scorer",
    "register_reward",
    "reward_names",
]


def default_compute_score_image(
    data_source: str, solution_image: Any, ground_truth: str, extra_info: dict | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Score one image with the reward that is registered under ``data_source``.

    Returns a dict with the number "score" and whatever else the reward tells. Further keyword arguments are its
    settings; the prompt, for rewards that look at it, is ``extra_info["prompt"]``.
    """
    extra_info = extra_info or {}
    scorer = make_scorer(data_source, kwargs)
    return scorer([solution_image], [ground_truth], [extra_info.get("prompt", "")], [extra_info])[0]
