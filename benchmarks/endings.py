"""How the quickstart ends: recipes side by side, chosen on some seeds and shown on others.

    python -m benchmarks.endings --out outputs/endings --parallel 16 [--choose 10 11] [--show 0 1 2 3 4]

Each run is the quickstart in one process with one thread. First every recipe of RECIPES is trained with the seeds of
--choose; the one whose last score is highest on average is then trained with the seeds of --show, beside the shipped
one. Curves are kept as small JSON files in --out; what is there is not repeated. Prints both tables in Markdown.
"""

import argparse
import json
import shutil
import sys
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.compare_algorithms import ACTOR, ROLLOUT, curve
from benchmarks.local_runs import Job, import_everything, run_all
from benchmarks.staleness import quickstart_settings
from verl_omni.utils.run_files import read_metrics

LR, SCHEDULE, EMA = f"{ACTOR}.optim.lr", f"{ACTOR}.optim.lr_scheduler_type", f"{ACTOR}.ema_decay"
EXACT = "val-aux/ocr_line/exact/mean@1"
SHIPPED = "2e-4, moving average"


def recipe(lr: str, schedule: str, average: float, *more: str) -> list[str]:
    return [f"{LR}={lr}", f"{SCHEDULE}={schedule}", f"{EMA}={average}", *more]


RECIPES: dict[str, list[str]] = {
    SHIPPED: recipe("2e-4", "constant", 0.9),
    "2e-4": recipe("2e-4", "constant", 0),
    "2e-4, short average": recipe("2e-4", "constant", 0.8),
    "3e-4, moving average": recipe("3e-4", "constant", 0.9),
    "3e-4, short average": recipe("3e-4", "constant", 0.8),
    "2e-4 to 0": recipe("2e-4", "cosine", 0),
    "2e-4 to 0, moving average": recipe("2e-4", "cosine", 0.9),
    "3e-4 to 0, moving average": recipe("3e-4", "cosine", 0.9),
    "4e-4 to 0, moving average": recipe("4e-4", "cosine", 0.9),
    "3e-4 to 0, moving average, clip 4e-3": recipe(
        "3e-4", "cosine", 0.9, f"{ACTOR}.diffusion_loss.clip_ratio=4e-3"
    ),
    "3e-4 to 0, moving average, n 24": recipe(
        "3e-4", "cosine", 0.9, "data.train_batch_size=4", f"{ROLLOUT}.n=24", f"{ACTOR}.ppo_mini_batch_size=2"
    ),
}
Scores = dict[int, float]


def train(recipe: str, seed: int, out: str, steps: int, more: list[str]) -> dict[str, Any]:
    from verl_omni.testing.local_trainer import local_config, local_trainer

    run_dir = Path(out) / "runs" / f"{recipe}_{seed}".replace(" ", "_").replace(",", "")
    seeds = ("trainer.seed", "data.seed", f"{ROLLOUT}.seed", f"{ACTOR}.engine.seed")
    given = [
        *quickstart_settings(Path(out)),
        *RECIPES[recipe],
        *(f"{key}={seed}" for key in seeds),
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=0",
        "trainer.resume_mode=disable",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={run_dir}",
        *more,
    ]
    shutil.rmtree(run_dir, ignore_errors=True)
    local_trainer(local_config(given)).fit()
    found = curve(run_dir)
    scores = {step: round(score, 4) for step, (score, _, _) in found.items()}
    exact = {row["step"]: row["data"][EXACT] for row in read_metrics(run_dir / "metrics.jsonl") if EXACT in row["data"]}
    told = {"recipe": recipe, "seed": seed, "settings": [*RECIPES[recipe], *more], "scores": scores, "exact": exact}
    return told | {"seconds": found[max(found)][2]}


def run(wanted: list[tuple[str, int]], options: argparse.Namespace, more: list[str]) -> None:
    """Train each recipe with its seed."""
    jobs = [
        Job(file_of(options.out, *one), train, (*one, str(options.out), options.steps, more))
        for one in dict.fromkeys(wanted)
    ]
    failed = run_all(jobs, options.parallel)
    if failed:
        sys.exit(f"error: failed, and their .log files say why: {', '.join(map(str, failed))}")


def file_of(out: Path, recipe: str, seed: int) -> Path:
    return out / f"{recipe}_seed{seed}.json".replace(" ", "_").replace(",", "")


def read(out: Path, recipes: list[str], seeds: list[int]) -> dict[str, list[Scores]]:
    def scores(recipe: str, seed: int) -> Scores:
        told = json.loads(file_of(out, recipe, seed).read_text())["scores"]
        return {int(step): score for step, score in told.items()}

    return {recipe: [scores(recipe, seed) for seed in seeds] for recipe in recipes}


def table(found: dict[str, list[Scores]]) -> str:
    """A line for each recipe: the mean score at each validation, the last ones, and how far below the best they are."""
    steps = list(next(iter(found.values()))[0])
    heads = ["recipe", *map(str, steps[:-1]), f"{steps[-1]} steps, each seed", "mean", "most below its best"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for recipe, runs in found.items():
        last = [scores[steps[-1]] for scores in runs]
        below = max(max(scores.values()) - scores[steps[-1]] for scores in runs)
        means = [f"{fmean(scores[step] for scores in runs):.3f}" for step in steps[:-1]]
        cells = [recipe, *means, " ".join(f"{score:.3f}" for score in last), f"{fmean(last):.3f}", f"{below:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def best(found: dict[str, list[Scores]]) -> str:
    """The recipe that ends highest on average."""
    return max(found, key=lambda recipe: fmean(scores[max(scores)] for scores in found[recipe]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--choose", nargs="*", type=int, default=[10, 11], help="seeds to choose on; none: show all")
    parser.add_argument("--show", nargs="*", type=int, default=[0, 1, 2, 3, 4], help="seeds to show the chosen one on")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--parallel", type=int, default=1, help="runs at once (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="of each run (%(default)s)")
    options, more = parser.parse_known_args()
    from verl_omni.quickstart.data import write_data

    write_data(options.out)
    import_everything()
    shown = options.recipes
    if options.choose:
        # the shipped one is shown in any case: it need not wait
        run([*product(options.recipes, options.choose), *product([SHIPPED], options.show)], options, more)
        found = read(options.out, options.recipes, options.choose)
        shown = list(dict.fromkeys([SHIPPED, best(found)]))
        print(f"{table(found)}\n\nchosen: {shown[-1]}\n", flush=True)
    if options.show:
        run(list(product(shown, options.show)), options, more)
        print(table(read(options.out, shown, options.show)))


if __name__ == "__main__":
    main()
