"""What staleness costs in learning: the quickstart's task, with samples that are 0, 1, 2, ... training steps behind.

    python -m benchmarks.staleness --out outputs/staleness [--steps 50] [--seeds 3] [--behind 0 1 2 4]

How far samples are behind does not depend on how quick this machine is: each run is a `trainer.replay` of an order that
is written beforehand, in which step k learns from what the weights after step k - s drew (the first ones from what
those before any step drew). It runs in one process with one thread; so many at once as there are cores. Both ways of
looking at old samples are tried: the ratio to the weights that drew, which the loss clips, and log-probabilities
computed again with importance weights (`algorithm.rollout_correction.rollout_is=step`). Runs that are there already
are not repeated. Prints a table in Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SCORE = "val-core/ocr_line/reward/mean@1"
CORRECTIONS = {"clipped": [], "weighted": ["algorithm.rollout_correction.rollout_is=step"]}


def quickstart_settings(out: Path) -> list[str]:
    """The quickstart's recipe as one would type it, but for the average of weights: scores are those of the last."""
    from omegaconf import OmegaConf

    from verl_omni.quickstart.__main__ import RECIPE
    from verl_omni.quickstart.task import CHECKPOINT

    recipe = OmegaConf.to_container(OmegaConf.load(RECIPE / "quickstart.yaml"))
    del recipe["defaults"], recipe["recipe"]
    return [
        *typed(recipe),
        f"actor_rollout_ref.model.path={CHECKPOINT}",
        f"data.train_files={out / 'train.parquet'}",
        f"data.val_files={out / 'val.parquet'}",
        "actor_rollout_ref.actor.ema_decay=0",
    ]


def typed(settings: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in settings.items():
        found += typed(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}={value}"]
    return found


def write_order(folder: Path, behind: int, steps: int, batch_size: int) -> None:
    """`order.jsonl` of a run whose every step learns from samples that many steps behind."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "order.jsonl").open("w") as lines:
        for step in range(steps):
            drawn_with = list(range(step * batch_size, (step + 1) * batch_size))
            version = max(0, step - behind)
            groups = [{"group": group, "version": version, "drawn_with": drawn_with} for group in drawn_with]
            lines.write(json.dumps({"step": step + 1, "data": {"groups": groups}}) + "\n")


def run(out: Path, behind: int, correction: str, seed: int, steps: int) -> Path:
    """A whole run in a process of its own; its folder."""
    folder = out / f"{behind}_{correction}_{seed}_{steps}"
    if not (folder / "report.html").exists():
        given = [f"--one={folder}", f"--behind={behind}", f"--only={correction}", f"--seed={seed}", f"--steps={steps}"]
        command = [sys.executable, "-m", "benchmarks.staleness", f"--out={out}", *given]
        with (out / f"{folder.name}.log").open("w") as log:
            subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, check=True)
        print(f"{folder.name} ...", file=sys.stderr, flush=True)
    return folder


def train(options: argparse.Namespace) -> None:
    from verl_omni.testing.local_trainer import local_config, local_trainer

    (behind,), steps, seed = options.behind, options.steps, options.seed
    given = [
        *quickstart_settings(options.out),
        *CORRECTIONS[options.only],
        f"trainer.default_local_dir={options.one}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        "trainer.save_freq=0",
        "trainer.resume_mode=disable",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
    ]
    if behind:
        order = options.out / f"order_{behind}_{steps}"
        given += ["trainer.mode=fully_async", f"trainer.max_staleness={behind}", f"trainer.replay={order}"]
    local_trainer(local_config(given)).fit()


def score(folder: Path) -> tuple[float, float]:
    """(held-out score at the end, mean staleness of the second half)."""
    rows = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    behind = [row.get("staleness/mean", 0.0) for row in rows[len(rows) // 2 :]]
    return rows[-1][SCORE], statistics.mean(behind)


def table(found: dict[tuple[int, str], list[tuple[float, float]]]) -> str:
    lines = ["| steps behind | old samples | held-out score, each seed | mean |", "|---|---|---|---|"]
    for (_, correction), runs in found.items():
        scores = [value for value, _ in runs]
        behind = statistics.mean(late for _, late in runs)
        shown = " ".join(f"{value:.3f}" for value in scores)
        lines.append(f"| {behind:g} | {correction} | {shown} | {statistics.mean(scores):.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=50, help="training steps of each (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (%(default)s)")
    parser.add_argument("--behind", type=int, nargs="+", default=[0, 1, 2, 4], help="training steps (0 1 2 4)")
    parser.add_argument("--only", choices=CORRECTIONS, help="one way of looking at old samples")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # a single run, in this process
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train(options)
        return
    from verl_omni.quickstart.data import write_data

    write_data(options.out)
    for behind in filter(None, options.behind):
        write_order(options.out / f"order_{behind}_{options.steps}", behind, options.steps, batch_size=6)
    kinds = [(b, c) for b in options.behind for c in (CORRECTIONS if b else ["clipped"]) if options.only in (None, c)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        folders = {
            kind: [pool.submit(run, options.out, *kind, seed, options.steps) for seed in range(options.seeds)]
            for kind in kinds
        }
        print(table({kind: [score(one.result()) for one in runs] for kind, runs in folders.items()}))


if __name__ == "__main__":
    main()
