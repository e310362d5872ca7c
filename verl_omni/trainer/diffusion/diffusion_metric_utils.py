"""Metrics of a training step, from its batch and its timings."""

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto

from verl_omni.utils.diversity import mean_distance

# Stages whose time grows with the number of images.
COMPUTE_STAGES = ("gen", "reward", "ref", "teacher", "old_log_prob", "adv", "update_actor")


def compute_data_metrics_diffusion(batch: DataProto) -> dict[str, Any]:
    """Rewards by image and, where `uid` tells them apart, by prompt group; advantages and returns if there are any.

    Rewards are (B,) or (B, T): an image's is the mean over its steps. A batch of cached pairs has none, and no metrics.
    """
    if "sample_level_rewards" not in batch.batch.keys():
        return {}
    rewards = batch.batch["sample_level_rewards"].float()
    rewards = rewards.reshape(len(rewards), -1).mean(dim=1)
    metrics = _summary("critic/rewards", rewards)
    if "uid" in batch.non_tensor_batch:
        metrics |= _group_metrics(rewards.tolist(), batch.non_tensor_batch["uid"]) | _diversity(batch.non_tensor_batch)
    for name in ("advantages", "returns"):
        if name in batch.batch.keys():
            metrics |= _summary(f"critic/{name}", batch.batch[name].float())
    return metrics


def _group_metrics(rewards: list[float], uids: np.ndarray) -> dict[str, float]:
    groups = defaultdict(list)
    for uid, reward in zip(uids, rewards, strict=True):
        groups[uid].append(reward)
    spread = [float(np.std(g, ddof=1)) if len(g) > 1 else 0.0 for g in groups.values()]
    return {
        "critic/rewards/std_mean": float(np.mean(spread)),
        "critic/rewards/zero_std_ratio": float(np.mean([s == 0.0 for s in spread])),
        "critic/rewards/group_size": len(rewards) / len(groups),
    }


def _diversity(rows: dict[str, np.ndarray]) -> dict[str, float]:
    """How far the images of a prompt are apart, by the small copies that came with their scores."""
    groups = defaultdict(list)
    for uid, picture in zip(rows["uid"], rows.get("coarse", ()), strict="coarse" in rows):
        groups[uid].append(picture)
    distance = mean_distance(groups.values())
    return {} if distance is None else {"critic/diversity": distance}


def _summary(name: str, values: torch.Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def compute_timing_metrics_diffusion(timing_raw: dict[str, float], num_images: int) -> dict[str, Any]:
    """Seconds of every stage, and milliseconds an image of those that compute."""
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name in COMPUTE_STAGES:
        if name in timing_raw:
            metrics[f"timing_per_image_ms/{name}"] = timing_raw[name] * 1000 / num_images
    return metrics


def compute_throughput_metrics_diffusion(batch: DataProto, timing_raw: dict[str, float], n_gpus: int) -> dict[str, Any]:
    """Images a second and device over the whole step."""
    seconds = timing_raw["step"]
    return {
        "perf/total_num_images": len(batch),
        "perf/time_per_step": seconds,
        "perf/throughput": len(batch) / (seconds * n_gpus),
    }


def compute_mfu_metrics(metrics: dict[str, Any], timing_raw: dict[str, float]) -> dict[str, Any]:
    """Achieved TFLOP/s and its share of the device's peak, by stage. Takes the workers' `flops/*` out of `metrics`."""
    counted = {name.removeprefix("flops/"): metrics.pop(name) for name in list(metrics) if name.startswith("flops/")}
    peak = counted.pop("peak", None)
    result = {}
    if peak is not None:
        counted = {stage: flops for stage, flops in counted.items() if stage in timing_raw}
        counted["step"] = sum(counted.values())
        for stage, flops in counted.items():
            rate = flops / timing_raw[stage]
            result |= {f"perf/tflops/{stage}": rate / 1e12, f"perf/mfu/{stage}": rate / peak}
    return result
