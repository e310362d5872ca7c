"""What was measured on an H200, kept for good in measured.json: the tables of docs are made of it.

One line a setting, by its name in `benchmarks.plan_check` or `benchmarks.scale`.
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("measured.json")
Figures = dict[str, Any]
KEPT = (
    *("images", "images/s", "step s", "stages s", "peak GiB", "first step", "attention", "rollout_corr/kl"),
    *("perf/tflops/gen", "perf/tflops/update_actor", "actor/first_ratio_max_dev", "actor/rollout_ratio_mean_dev"),
    *(f"timing_s/{stage}" for stage in ("gen_denoise", "gen_decode", "ref", "old_log_prob", "update_actor")),
    *("ranks", "rows", "held GiB", "update GiB", "rollout GiB", "update s", "rollout s"),
)


def read(file: Path = FILE) -> dict[str, Figures]:
    return json.loads(file.read_text())


def keep(found: dict[str, Figures], file: Path = FILE) -> dict[str, Figures]:
    """All that there is then. Of a setting that was measured before, the new figures count."""
    there = read(file) | {name: _short(figures) for name, figures in found.items()}
    lines = (f"{json.dumps(name)}: {json.dumps(figures)}" for name, figures in there.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return there


def _short(figures: Figures) -> Figures:
    kept = {name: figures[name] for name in KEPT if name in figures}
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in kept.items()}
