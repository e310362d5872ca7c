"""One self-contained HTML page about a training run, and its before/after table for the console.

    python -m verl_omni.report.report RUN_DIR

Reads what the trainer writes into its run folder: ``metrics.jsonl``, ``config.yaml``, ``starts.jsonl``,
``timeline.jsonl`` and ``validation/step_<N>/`` with images and ``samples.jsonl``. Every run ends with it.
"""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from verl_omni.report.charts import Series, line_chart, stacked_bars
from verl_omni.report.galleries import before_and_after, best_and_worst, read_samples, section
from verl_omni.report.starts import read_starts
from verl_omni.report.style import STYLE
from verl_omni.report.timeline import timeline_chart
from verl_omni.report.tracking import readable
from verl_omni.utils.run_files import read_config, read_metrics

WIDE, NARROW = 1000, 480
SEEDS = ("trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed")
OUTSIDE_STEP = ("settle", "testing", "save_checkpoint")


@dataclass(frozen=True)
class Change:
    """A number at the first and at the last step that has it."""

    label: str
    before: float
    after: float
    steps: tuple[int, int]


class Run:
    """What a run folder holds."""

    def __init__(self, run_dir: str | Path):
        self.dir = Path(run_dir)
        metrics = self.dir / "metrics.jsonl"
        if not metrics.is_file():
            raise FileNotFoundError(
                f"{self.dir} is no run folder: it has no metrics.jsonl (trainer.logger needs jsonl)"
            )
        self.entries = read_metrics(metrics)
        if not self.entries:
            raise ValueError(f"{metrics} is empty: the run has not logged a step yet")
        config = self.dir / "config.yaml"
        self.config = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else None
        self.starts = read_starts(self.dir)

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
        labels = {name: _validation_label(name) for name in self.names("val-core/") + self.names("val-aux/")}
        labels = {name: label for name, label in labels.items() if not name.endswith("/failed")}
        labels["critic/rewards/mean"] = "training reward"
        found = []
        for name, label in labels.items():
            if curve := self.curve(name):
                (first, before), (last, after) = curve[0], curve[-1]
                change = Change(label, before, after, (first, last))
                found.append(self._same_prompts(change) if name.startswith("val-core/") else change)
        return found

    def _same_prompts(self, change: Change) -> Change:
        """Where scores failed, the means are of different prompts: then over those that have a score both times."""
        failed = {name for name in self.names("val-aux/") if name.endswith("/failed")}
        steps = {step for name in failed for step, count in self.curve(name) if count}
        folders = dict(self.validations())
        if not steps & set(change.steps) or not set(change.steps) <= set(folders) or len(self.names("val-core/")) > 1:
            return change
        scores = [{s["index"]: s["score"] for s in read_samples(folders[step])} for step in change.steps]
        both = [i for i, score in scores[0].items() if score is not None and scores[1].get(i) is not None]
        if not both:
            return change
        before, after = (sum(one[i] for i in both) / len(both) for one in scores)
        return Change(f"{change.label}, {len(both)} prompts scored both times", before, after, change.steps)

    def validations(self) -> list[tuple[int, Path]]:
        """(step, folder) of the validations whose images are kept, in the order of steps."""
        folders = self.dir.glob("validation/step_*/samples.jsonl")
        return sorted((int(file.parent.name.removeprefix("step_")), file.parent) for file in folders)


def write_report(
    run_dir: str | Path,
    out_path: str | Path | None = None,
    title: str | None = None,
    continue_command: str | None = None,
) -> Path:
    """Write the report of a run and return its path, ``report.html`` in the run folder by default.

    ``title`` is by default what the config says about the run (``recipe``), or its algorithm and model.
    ``continue_command`` is shown as what to type to train on from here.
    """
    run = Run(run_dir)
    title = title or run.setting("recipe") or _what(run)
    out_path = Path(out_path) if out_path else run.dir / "report.html"
    sections = [
        _headline(run, title),
        section("Learning", _learning_charts(run)),
        section("Time", _timing_chart(run) + _pools_chart(run)),
        before_and_after(run.validations()),
        best_and_worst(run.dir),
        section(
            "Go on from here", f'<pre class="command">{escape(continue_command)}</pre>' if continue_command else ""
        ),
        section("Started with", _about(run)),
        _config(run),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main></body></html>\n"
    )
    out_path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out_path.with_name(out_path.name + ".tmp")
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(out_path)
    return out_path


def format_before_after_table(run_dir: str | Path) -> str:
    """The numbers before and after training as a table of plain text."""
    rows = [("", "before", "after", "change")]
    for change in Run(run_dir).changes():
        difference = change.after - change.before
        rows.append((change.label, readable(change.before), readable(change.after), readable(difference, sign="+")))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{row[0]:<{widths[0]}}  " + "  ".join(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def _what(run: Run) -> str:
    model, algorithm = (run.setting(f"actor_rollout_ref.model.{name}") for name in ("path", "algorithm"))
    return f"{algorithm} on {Path(model).name}" if model else "Training report"


def _validation_label(name: str) -> str:
    """``val-core/ocr/reward/mean@1`` -> ``validation reward (ocr)``."""
    _, source, *metric = name.split("/")
    what = "/".join(metric[:-1]) or metric[-1]
    average = f", {metric[-1]}" if metric[-1] != "mean@1" else ""
    return f"validation {what} ({source}{average})"


def _headline(run: Run, title: str) -> str:
    cards = []
    for change in run.changes():
        difference = change.after - change.before
        trend = "up" if difference > 0 else "down" if difference < 0 else "flat"
        cards.append(
            f'<div class="card"><div class="label">{escape(change.label)}</div>'
            f'<div class="value">{readable(change.before)} <span class="arrow">→</span> '
            f"{readable(change.after)}</div>"
            f'<div class="{trend}">{readable(difference, sign="+")}, '
            f"step {change.steps[0]} to {change.steps[1]}</div></div>"
        )
    facts = [f"{run.entries[-1]['step']} steps"]
    if seconds := run.curve("timing_s/step"):
        facts.append(f"{_duration(sum(s for _, s in seconds))} of training")
    if images := run.curve("perf/total_num_images"):
        done = "scored" if run.curve("critic/rewards/mean") else "of pairs"
        facts.append(f"{sum(n for _, n in images):,.0f} images {done}")
    failed = [sum(n for _, n in run.curve(name)) for name in run.names("val-aux/") if name.endswith("/failed")]
    if sum(failed):
        facts.append(f"{sum(failed):.0f} scores of validation failed")
    return (
        f'<header><h1>{escape(title)}</h1><p class="facts">{" · ".join(facts)}</p></header>'
        f'<div class="cards">{"".join(cards)}</div>'
    )


def _learning_charts(run: Run) -> str:
    rewards = [Series("training", run.curve("critic/rewards/mean"))]
    rewards += [Series(_validation_label(n), run.curve(n), markers=True) for n in run.names("val-core/")]
    charts = [("Reward", rewards, False, "wide")] if any(one.points for one in rewards) else []
    several = [name for name in run.names("reward/") if name.endswith("/mean")]
    if len(several) > 1:
        named = [Series(name.split("/")[1], run.curve(name)) for name in several]
        charts.append(("Each reward", named, False, "wide"))
    charts += [
        (heading, [Series(name, run.curve(name))], percent, "")
        for heading, name, percent in (
            ("Reward's standard deviation in a group", "critic/rewards/std_mean", False),
            ("Groups whose rewards are all equal", "critic/rewards/zero_std_ratio", True),
            ("Pairs whose chosen image the model prefers", "actor/implicit_accuracy", True),
            ("Margin of the chosen image", "actor/implicit_margin", False),
            ("KL to the reference", "actor/kl_loss", False),
            ("KL of old and new policy", "actor/ppo_kl", False),
            ("Clip fraction", "actor/pg_clipfrac", True),
            ("Gradient norm", "actor/grad_norm", False),
            ("Loss", "actor/loss", False),
        )
        if run.curve(name)
    ]
    return '<div class="charts">' + "".join(_figure(*chart) for chart in charts) + "</div>" if charts else ""


def _figure(heading: str, series: Sequence[Series], percent: bool, kind: str) -> str:
    body = line_chart(series, width=WIDE if kind == "wide" else NARROW, percent=percent)
    return f'<figure class="{kind}"><figcaption>{escape(heading)}</figcaption>{body}</figure>'


def _timing_chart(run: Run) -> str:
    prefix = "timing_s/"
    rows = [
        (e["step"], {k.removeprefix(prefix): v for k, v in e["data"].items() if k.startswith(prefix) and v})
        for e in run.entries
    ]
    rows = [(step, seconds) for step, seconds in rows if "step" in seconds]
    if not rows:
        return ""
    # `gen_denoise` and the like are parts of `gen`.
    names = dict.fromkeys(n for _, seconds in rows for n in seconds if n != "step" and not n.startswith("gen_"))
    parts = {name: [seconds.get(name, 0.0) for _, seconds in rows] for name in names}
    inside = [name for name in parts if name not in OUTSIDE_STEP]
    rest = [max(s["step"] - sum(parts[n][i] for n in inside), 0.0) for i, (_, s) in enumerate(rows)]
    ordered = {name: parts[name] for name in inside} | {"other": rest}
    ordered |= {name: parts[name] for name in OUTSIDE_STEP if name in parts}
    chart = stacked_bars([step for step, _ in rows], ordered, width=WIDE)
    return f'<figure class="wide"><figcaption>Seconds of each step</figcaption>{chart}</figure>'


def _pools_chart(run: Run) -> str:
    """Where training and rollout have devices of their own: who did what when."""
    chart = timeline_chart(run.dir, width=WIDE)
    heading = "Who did what in the last steps"
    return f'<figure class="wide"><figcaption>{heading}</figcaption>{chart}</figure>' if chart else ""


def _about(run: Run) -> str:
    """What made this run: enough to make it again."""
    reward = run.setting("reward.custom_reward_function.path")
    facts = {
        "Model": run.setting("actor_rollout_ref.model.path"),
        "Algorithm": run.setting("actor_rollout_ref.model.algorithm"),
        "Training data": run.setting("data.train_files"),
        "Validation data": run.setting("data.val_files"),
        "Reward": reward and f"{run.setting('reward.custom_reward_function.name')} in {reward}",
        "Seeds": ", ".join(f"{name}={run.setting(name)}" for name in SEEDS if run.setting(name) is not None),
    }
    for start in run.starts:
        code = f"verl-omni {start['verl_omni']}" + (f" at {start['code']}" if start.get("code") else "")
        code += f", your commit {start['commit']}" if start["commit"] else ""
        facts[f"Started at step {start['step']}"] = f"{start['date']}, {code}, on {start['machine']}"
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(said))}</dd>" for name, said in facts.items() if said)
    command = run.starts[-1]["command"] if run.starts else None
    shown = f'<pre class="command">{escape(command)}</pre>' if command else ""
    return f'<dl class="about">{rows}</dl>{shown}' if rows else ""


def _config(run: Run) -> str:
    if run.config is None:
        return ""
    return f"<section><details><summary>Config</summary><pre>{escape(run.config)}</pre></details></section>"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write report.html about a training run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder with metrics.jsonl, config.yaml and validation/")
    parser.add_argument("--out", help="default: report.html in the run folder")
    parser.add_argument("--title", help="default: the config's `recipe`")
    parser.add_argument("--continue-command", help="what to type to train on, shown in the report")
    args = parser.parse_args()
    try:
        path = write_report(args.run_dir, args.out, args.title, args.continue_command)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(format_before_after_table(args.run_dir))
    print(f"Report: {path}")


if __name__ == "__main__":
    main()
