"""Rank cheaply, train exactly (`rollout.pool`): many images at less cost, the best and the worst again."""

import dataclasses
import math
from typing import Any

import torch
from verl.protocol import DataProto

from verl_omni.utils.seeds import derive_seeds


def chosen_seeds(
    trainer: Any, prompts: DataProto, step: int, groups: range
) -> tuple[list[list[int]], dict[str, float]]:
    """(of each prompt the seeds of its `rollout.n` images, metrics). An image starts from the noise of its seed.

    The pool is drawn by the ODE: what an image becomes is then decided by where it starts.
    """
    rollout = trainer.config.actor_rollout_ref.rollout
    size = rollout.pool.size
    seeds = derive_seeds(rollout.seed, "pool", step, count=(max(groups) + 1) * size)
    own = [seeds[group * size + i] for group in groups for i in range(size)]
    sampling = dataclasses.asdict(rollout.pipeline) | {
        "num_inference_steps": rollout.pool.num_inference_steps or rollout.pipeline.num_inference_steps,
        "noise_level": 0.0,
        "sde_type": rollout.algo.sde_type,
        **in_precision(rollout.pool.precision or rollout.precision),
        **asked_of(trainer.config.reward, shown=False),
    }
    batch = trainer._rollout_batch(prompts[list(range(len(prompts)))], size, own, sampling, step, groups)
    batch.meta_info["scores_only"] = True
    _, collect = trainer._draw(batch, trainer.algorithm.rollout_policy)()
    scores = collect().batch["rm_scores"][:, 0]
    by_prompt = scores.reshape(-1, size).tolist()
    kept = [best_and_worst(row, rollout.n) for row in by_prompt]
    chosen = [[own[prompt * size + i] for i in places] for prompt, places in enumerate(kept)]
    scored = scores[~scores.isnan()]
    metrics = {
        "pool/drawn": float(len(scores)),
        "pool/reward_mean": scored.mean().item() if len(scored) else math.nan,
        "pool/gap": _gap(by_prompt, kept),
    }
    return chosen, metrics


def in_precision(precision: str | None) -> dict[str, str]:
    """What a request says of it: nothing, where it is training's."""
    return {} if precision is None else {"precision": precision}


def asked_of(reward: Any, shown: bool) -> dict[str, str]:
    """What a request says of latents: nothing, where rewards see what is decoded. What is `shown` is decoded too."""
    return {} if reward.input == "decoded" else {"latents": "too" if shown else "alone"}


def best_and_worst(scores: list[float], count: int) -> list[int]:
    """Places of the best (of an odd number one more of these) and the worst; images without a score come last."""
    there = sorted((i for i, score in enumerate(scores) if not math.isnan(score)), key=lambda i: -scores[i])
    order = there + [i for i, score in enumerate(scores) if math.isnan(score)]
    best = (count + 1) // 2
    if len(there) < count:
        return order[:count]
    return there[:best] + there[len(there) - (count - best) :]


def _gap(by_prompt: list[list[float]], kept: list[list[int]]) -> float:
    """How much better the best half of what is kept scored than the worst, on average."""
    gaps = []
    for row, places in zip(by_prompt, kept, strict=True):
        best = (len(places) + 1) // 2
        halves = [torch.tensor([row[i] for i in half]) for half in (places[:best], places[best:])]
        gaps.append((halves[0].nanmean() - halves[1].nanmean()).item())
    return sum(gaps) / len(gaps)
