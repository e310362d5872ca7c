"""The charts of a run: what it learns, where its time goes, what it holds in memory."""

from collections.abc import Sequence
from pathlib import Path

from verl_omni.report.charts import Chart, Series, line_chart, stacked_bars
from verl_omni.report.run import Run, validation_label
from verl_omni.report.timeline import timeline_chart

OUTSIDE_STEP = ("settle", "testing", "save_checkpoint")
# (heading, metric, whether it is a share)
LEARNING = (
    ("Reward's standard deviation in a group", "critic/rewards/std_mean", False),
    ("Groups whose rewards are all equal", "critic/rewards/zero_std_ratio", True),
    ("Distance of a prompt's images", "critic/diversity", False),
    ("Pairs whose chosen image the model prefers", "actor/implicit_accuracy", True),
    ("Margin of the chosen image", "actor/implicit_margin", False),
    ("KL to the reference", "actor/kl_loss", False),
    ("KL of old and new policy", "actor/ppo_kl", False),
    ("Clip fraction", "actor/pg_clipfrac", True),
    ("Gradient norm", "actor/grad_norm", False),
    ("Loss", "actor/loss", False),
)


def learning(run: Run) -> list[Chart]:
    rewards = [Series("training", run.curve("critic/rewards/mean"))]
    rewards += [Series(validation_label(n), run.curve(n), markers=True) for n in run.names("val-core/")]
    charts = [line_chart("Reward", rewards, wide=True)] if any(one.points for one in rewards) else []
    several = [name for name in run.names("reward/") if name.endswith("/mean")]
    if len(several) > 1:
        charts.append(line_chart("Each reward", _named(run, several, 1), wide=True))
    for heading, name, percent in LEARNING:
        if curve := run.curve(name):
            charts.append(line_chart(heading, [Series(name, curve)], percent))
    return charts


def time(run: Run) -> list[Chart]:
    return [*_timing(run), *_pools(run.dir), *_idle(run)]


def memory(run: Run) -> list[Chart]:
    """Of the devices, in GB; a CPU has none of its own."""
    names = [name for name in run.names("perf/") if "memory" in name and any(gb for _, gb in run.curve(name))]
    return [line_chart("Memory in GB", _named(run, names, -1), wide=True)] if names else []


def _idle(run: Run) -> list[Chart]:
    names = run.names("idle/")
    return [line_chart("Share of a step spent waiting", _named(run, names, -1), True)] if _any(run, names) else []


def _named(run: Run, names: Sequence[str], part: int) -> list[Series]:
    return [Series(name.split("/")[part].replace("_", " "), run.curve(name)) for name in names]


def _any(run: Run, names: Sequence[str]) -> bool:
    return any(run.curve(name) for name in names)


def _timing(run: Run) -> list[Chart]:
    prefix = "timing_s/"
    rows = [
        (e["step"], {k.removeprefix(prefix): v for k, v in e["data"].items() if k.startswith(prefix) and v})
        for e in run.entries
    ]
    rows = [(step, seconds) for step, seconds in rows if "step" in seconds]
    if not rows:
        return []
    # `gen_denoise` and the like are parts of `gen`.
    names = dict.fromkeys(n for _, seconds in rows for n in seconds if n != "step" and not n.startswith("gen_"))
    parts = {name: [seconds.get(name, 0.0) for _, seconds in rows] for name in names}
    inside = [name for name in parts if name not in OUTSIDE_STEP]
    rest = [max(s["step"] - sum(parts[n][i] for n in inside), 0.0) for i, (_, s) in enumerate(rows)]
    ordered = {name: parts[name] for name in inside} | {"other": rest}
    ordered |= {name: parts[name] for name in OUTSIDE_STEP if name in parts}
    return [stacked_bars("Seconds of each step", [step for step, _ in rows], ordered)]


def _pools(run_dir: Path) -> list[Chart]:
    """Where training and rollout have devices of their own: who did what when."""
    chart = timeline_chart(run_dir, "Who did what in the last steps")
    return [chart] if chart else []
