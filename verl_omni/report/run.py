"""A run's folder, read: its metrics, settings, validations and starts."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from verl_omni.report.galleries import read_samples
from verl_omni.report.starts import read_starts
from verl_omni.utils.run_files import read_config, read_metrics


@dataclass(frozen=True)
class Change:
    """A number at the first and at the last step that has it."""

    label: str
    before: float
    after: float
    steps: tuple[int, int]


class Run:
    """What a run folder holds. `entries` are its metrics, where somebody has read them: a new run has none yet."""

    def __init__(self, run_dir: str | Path, entries: Sequence[dict[str, Any]] | None = None):
        self.dir = Path(run_dir)
        self.entries = self._logged() if entries is None else entries
        config = self.dir / "config.yaml"
        self.config = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else None
        self.starts = read_starts(self.dir)

    def _logged(self) -> list[dict[str, Any]]:
        metrics = self.dir / "metrics.jsonl"
        if not metrics.is_file():
            raise FileNotFoundError(
                f"{self.dir} is no run folder: it has no metrics.jsonl (trainer.logger needs jsonl)"
            )
        entries = read_metrics(metrics)
        if not entries:
            raise ValueError(f"{metrics} is empty: the run has not logged a step yet")
        return entries

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration as a tree; empty where the folder has none."""
        return read_config(self.dir / "config.yaml") if self.config else {}

    def setting(self, name: str) -> Any:
        """A setting by its dotted name, None where there is none."""
        return functools.reduce(
            lambda node, key: node.get(key) if isinstance(node, dict) else None, name.split("."), self.settings
        )

    def names(self, prefix: str) -> list[str]:
        """Metrics that start with ``prefix``, in the order of their first appearance."""
        return list(dict.fromkeys(k for entry in self.entries for k in entry["data"] if k.startswith(prefix)))

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric at each step that has a number for it."""
        values = ((entry["step"], entry["data"].get(name)) for entry in self.entries)
        return [(step, value) for step, value in values if isinstance(value, int | float)]

    def changes(self) -> list[Change]:
        """Validation numbers, then the training reward, before and after."""
        labels = {name: validation_label(name) for name in self.names("val-core/") + self.names("val-aux/")}
        labels = {name: label for name, label in labels.items() if not name.endswith("/failed")}
        labels["critic/rewards/mean"] = "training reward"
        found = []
        for name, label in labels.items():
            if curve := self.curve(name):
                (first, before), (last, after) = curve[0], curve[-1]
                change = Change(label, before, after, (first, last))
                found.append(self._same_prompts(change, name) if name.startswith("val-") else change)
        return found

    def _same_prompts(self, change: Change, name: str) -> Change:
        """Where scores failed, the means are of different prompts: then over those that have a score both times."""
        kind, source, *what = name.split("/")
        told = "/".join(what[:-1]) if kind == "val-aux" else None
        failed = {step for step, count in self.curve(f"val-aux/{source}/failed") if count}
        if not failed & set(change.steps):
            return change
        folders = dict(self.validations())
        scores = [self._scores(folders.get(step), source, told) for step in change.steps]
        both = [i for i, score in scores[0].items() if score is not None and scores[1].get(i) is not None]
        if not both:
            return replace(change, label=f"{change.label}, not of the same prompts as some scores failed")
        before, after = (sum(one[i] for i in both) / len(both) for one in scores)
        return Change(f"{change.label}, {len(both)} prompts scored both times", before, after, change.steps)

    def _scores(self, folder: Path | None, source: str, told: str | None) -> dict[int, float | None]:
        """Of the prompts of a source whose images were kept; `told`: another number that the reward told beside it.

        A run of an earlier version does not say of which source a prompt is.
        """
        rows = read_samples(folder) if folder else []
        unsaid = source if len(self.names("val-core/")) == 1 else None
        rows = [row for row in rows if row.get("data_source", unsaid) == source]
        if told is None:
            return {row["index"]: row["score"] for row in rows}
        scored = {row["index"]: row.get("reward_extra_info") or {} for row in rows if row["score"] is not None}
        return {index: extra.get(told) for index, extra in scored.items()}

    def validations(self) -> list[tuple[int, Path]]:
        """(step, folder) of the validations whose images are kept, in the order of steps."""
        folders = self.dir.glob("validation/step_*/samples.jsonl")
        return sorted((int(file.parent.name.removeprefix("step_")), file.parent) for file in folders)


def validation_label(name: str) -> str:
    """``val-core/ocr/reward/mean@1`` -> ``validation reward (ocr)``."""
    _, source, *metric = name.split("/")
    what = "/".join(metric[:-1]) or metric[-1]
    average = f", {metric[-1]}" if metric[-1] != "mean@1" else ""
    return f"validation {what} ({source}{average})"
