"""What validation shows and keeps: scores by data source, and the images themselves on disk."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from verl.protocol import DataProto

from verl_omni.reward_loop.reward_function import as_pil


def validation_metrics(batch: DataProto, n: int) -> dict[str, float]:
    """`val-core/<data_source>/reward/mean@n`, and the mean of every other number that the reward function told."""
    values: dict[str, list[float]] = defaultdict(list)
    scores = batch.batch["rm_scores"][:, 0].tolist()
    sources = batch.non_tensor_batch["data_source"]
    for source, score, extra in zip(sources, scores, reward_extras(batch), strict=True):
        values[f"val-core/{source}/reward/mean@{n}"].append(score)
        for key, told in extra.items():
            if isinstance(told, int | float | np.number) and not isinstance(told, bool):
                values[f"val-aux/{source}/{key}/mean@{n}"].append(float(told))
    return {name: float(np.mean(v)) for name, v in values.items()}


def reward_extras(batch: DataProto) -> Sequence[dict[str, Any]]:
    """What the reward function told of each image beside its score."""
    return batch.non_tensor_batch.get("reward_extra_info", [{}] * len(batch))


def write_validation(batch: DataProto, folder: Path, limit: int) -> None:
    """`<index>.png` (a video: .gif) and samples.jsonl, one line an image, for the first `limit` images."""
    folder.mkdir(parents=True, exist_ok=True)
    extras = reward_extras(batch)
    with (folder / "samples.jsonl").open("w") as lines:
        for i in range(len(batch) if limit < 0 else min(limit, len(batch))):
            name = write_image(batch.batch["responses"][i].float() / 255, folder, f"{i:05d}")
            reward_model = batch.non_tensor_batch["reward_model"][i] or {}
            row = {
                "index": i,
                "prompt": batch.non_tensor_batch["prompt"][i],
                "ground_truth": reward_model.get("ground_truth"),
                "score": batch.batch["rm_scores"][i, 0].item(),
                "seed": int(batch.non_tensor_batch["seed"][i]),
                "image": name,
                "reward_extra_info": extras[i],
            }
            lines.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def write_image(pixels: Any, folder: Path, stem: str) -> str:
    """Write an image, or a video as an animation; the file's name."""
    picture = as_pil(pixels)
    if isinstance(picture, list):
        picture[0].save(folder / f"{stem}.gif", save_all=True, append_images=picture[1:], duration=125, loop=0)
        return f"{stem}.gif"
    picture.save(folder / f"{stem}.png")
    return f"{stem}.png"
