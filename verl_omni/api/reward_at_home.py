"""The reward of a run that was started from Python: `reward.custom_reward_function.path` is this file."""

from typing import Any

from verl_omni.api.home import call_home

REWARD = "reward"


def one(solution_image: Any, data_source: str, prompt: str, ground_truth: Any, extra_info: dict, code: str) -> Any:
    """`code` is what the function was written as: a run that goes on with another one is told so."""
    named = {"data_source": data_source, "prompt": prompt, "ground_truth": ground_truth, "extra_info": extra_info}
    return call_home(REWARD, {"solution_image": solution_image, **named})


def many(
    solution_images: list,
    data_sources: list[str],
    prompts: list[str],
    ground_truths: list,
    extra_infos: list[dict],
    code: str,
) -> Any:
    named = {"prompts": prompts, "ground_truths": ground_truths, "extra_infos": extra_infos}
    return call_home(REWARD, {"solution_images": solution_images, "data_sources": data_sources, **named})
