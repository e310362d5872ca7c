"""What validation shows and keeps: scores by data source, and the images themselves on disk."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from verl.protocol import DataProto


def validation_metrics(batch: DataProto, n: int) -> dict[str, float]:
    """`val-core/<data_source>/reward/mean@n`, and the mean of every other number that the reward function told.

    Where a reward tells a `tag`, such as the task of a GenEval prompt, each tag has a mean of its own, and all of them
    one in which every tag counts the same (`mean_of_tags`).
    """
    values: dict[str, list[float]] = defaultdict(list)
    tagged: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    scores = batch.batch["rm_scores"][:, 0].tolist()
    sources = batch.non_tensor_batch["data_source"]
    for source, score, extra in zip(sources, scores, reward_extras(batch), strict=True):
        if math.isnan(score):  # its reward failed: no score is not a low one
            values[f"val-aux/{source}/failed"].append(1.0)
            continue
        values[f"val-core/{source}/reward/mean@{n}"].append(score)
        for key in (key for key in extra if key.split("/")[-1] == "tag"):
            told = score if key == "tag" else extra.get(key.removesuffix("/tag"))
            if not isinstance(told, int | float):  # a name of the user's own
                continue
            tagged[f"val-aux/{source}/{key.removesuffix('tag')}"][str(extra[key])].append(told)
        for key, told in extra.items():
            if isinstance(told, int | float | np.number) and not isinstance(told, bool):
                values[f"val-aux/{source}/{key}/mean@{n}"].append(float(told))
    for name, tags in tagged.items():
        means = {tag: float(np.mean(scores)) for tag, scores in tags.items()}
        values |= {f"{name}{tag}/mean@{n}": [mean] for tag, mean in means.items()}
        values[f"{name}mean_of_tags/mean@{n}"] = list(means.values())
    return {name: float(np.sum(v) if name.endswith("/failed") else np.mean(v)) for name, v in values.items()}


def reward_extras(batch: DataProto) -> Sequence[dict[str, Any]]:
    """What the reward function told of each image beside its score."""
    return batch.non_tensor_batch.get("reward_extra_info", [{}] * len(batch))


def training_folder(run_dir: Path, step: int) -> Path:
    """Images of a training step that are kept."""
    return run_dir / "training" / f"step_{step}"


def write_training_samples(batch: DataProto) -> None:
    """Of the images that were kept: the best and the worst of some prompts, by the step that they were drawn for."""
    folders: dict[Path, list[int]] = defaultdict(list)
    columns = batch.non_tensor_batch
    for row, (file, place) in enumerate(zip(columns["written"], columns["keep_to"], strict=True)):
        if file is not None:
            folders[Path(place).parent].append(row)
    for folder, rows in folders.items():
        write_samples(batch[rows], folder, "a")


def write_samples(batch: DataProto, folder: Path, mode: str = "w") -> None:
    """samples.jsonl: one line for each sample that was written."""
    folder.mkdir(parents=True, exist_ok=True)
    extras = reward_extras(batch)
    path = folder / "samples.jsonl"
    whole = path.with_suffix(".tmp")  # who looks while a run goes on, or after it was killed, sees no half line
    with whole.open("w", encoding="utf-8") as lines:
        lines.write(path.read_text(encoding="utf-8") if mode == "a" and path.exists() else "")
        for i, file in enumerate(batch.non_tensor_batch["written"]):
            if file is None:
                continue
            reward_model = batch.non_tensor_batch["reward_model"][i] or {}
            row = {
                "index": i,
                "prompt": batch.non_tensor_batch["prompt"][i],
                "data_source": batch.non_tensor_batch["data_source"][i],
                "ground_truth": reward_model.get("ground_truth"),
                "score": None if math.isnan(score := batch.batch["rm_scores"][i, 0].item()) else score,
                "seed": int(batch.non_tensor_batch["seed"][i]),
                **file,
                "reward_extra_info": extras[i],
            }
            lines.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    whole.replace(path)
