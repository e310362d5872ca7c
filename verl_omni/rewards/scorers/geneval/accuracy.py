"""GenEval's table: the share of images that are right, by task and over all tasks."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_omni.rewards.scorers.geneval.tasks import TAGS
from verl_omni.utils.json_files import read_lines


def accuracy(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """By task, in the paper's order, and `overall`: the mean over the tasks that there are, not over their images.

    A row is a line of a validation's samples.jsonl, or what the geneval reward told of an image (`reward_extra_info`).
    Rows of other rewards are passed over.
    """
    right: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        told = row.get("reward_extra_info", row)
        told = {key.split("/")[-1]: value for key, value in told.items() if key.split("/")[-1] in ("tag", "correct")}
        if len(told) == 2:
            right[told["tag"]].append(float(told["correct"]))
    if not right:
        raise ValueError("none of the rows was scored by the geneval reward: its rows tell a tag and correct")
    by_task = {tag: fmean(right[tag]) for tag in TAGS if tag in right}
    return by_task | {"overall": fmean(by_task.values())}


def accuracy_of(validation: str | Path) -> dict[str, float]:
    """The same of a folder validation/step_<N>: of the images written there (with trainer.log_val_images=-1, all)."""
    return accuracy(row for _, row in read_lines(Path(validation) / "samples.jsonl"))
