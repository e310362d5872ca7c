"""Think, then draw: what learns, side by side. Held-out OCR score of numbers that are asked for in words.

    python -m benchmarks.think_then_draw --out outputs/think [--seeds 0 1 2] [--parallel 4] [--json found.json]

The rewriter alone, the generator alone, both, and the control: the rewriter with scores that are dealt to the wrong
images. Each run is the real trainer in a process of its own, on the CPU and on one thread. Runs that are already whole
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

from verl_omni.utils.run_files import read_metrics

TRAIN = "actor_rollout_ref.rewriter.train"
RUNS = {
    "rewriter": [f"{TRAIN}=rewriter"],
    "generator": [f"{TRAIN}=generator"],
    "both": [f"{TRAIN}=both"],
    "control": [f"{TRAIN}=rewriter", "reward.custom_reward_function.path=pkg://verl_omni.quickstart.control"],
}
SEEDS = ("trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.engine.seed")


def settings(name: str, seed: int, steps: int) -> list[str]:
    return [
        *RUNS[name],
        *(f"{knob}={seed}" for knob in SEEDS),
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={max(1, steps // 5)}",
        "trainer.save_freq=0",
        "trainer.log_val_images=8",
        "trainer.device=cpu",
    ]


def run_one(folder: Path, overrides: list[str]) -> None:
    """One run in this process, without Ray."""
    import torch
    from hydra import compose, initialize_config_dir

    from verl_omni.config import schema
    from verl_omni.quickstart.__main__ import RECIPE, training_command
    from verl_omni.testing.local_trainer import local_trainer
    from verl_omni.trainer.checks.preflight import preflight

    torch.set_num_threads(1)
    schema.register()
    command = training_command(folder.parent / f"data_{folder.name}", folder, overrides, "think_then_draw")
    search = "hydra.searchpath=[pkg://verl_omni.trainer.config]"
    with initialize_config_dir(str(RECIPE), version_base=None):
        config = compose("think_then_draw", [search, *command[command.index("--config-name") + 2 :]])
    local_trainer(preflight(config)).fit()


def curve(run_dir: Path) -> dict[int, float]:
    """Step -> held-out score."""
    rows = read_metrics(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").is_file() else []
    scores = {row["step"]: [v for k, v in row["data"].items() if k.startswith("val-core/")] for row in rows}
    return {step: found[0] for step, found in scores.items() if found}


def seconds(run_dir: Path) -> float:
    """A step's, the median."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    return statistics.median([r["data"]["timing_s/step"] for r in rows if "timing_s/step" in r["data"]])


def table(found: dict[str, list[dict[int, float]]]) -> str:
    """A line for each: mean over seeds, and lowest to highest."""
    steps = list(next(iter(found.values()))[0])
    lines = ["| what learns | " + " | ".join(f"{step} steps" for step in steps) + " |", "|---" * (len(steps) + 1) + "|"]
    for name, curves in found.items():
        cells = []
        for step in steps:
            scores = [one[step] for one in curves]
            spread = f" ({min(scores):.3f} to {max(scores):.3f})" if len(scores) > 1 and step else ""
            cells.append(f"{statistics.mean(scores):.3f}{spread}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, a core each")
    parser.add_argument("--json", type=Path, help="file to write the curves to")
    parser.add_argument("--one", nargs=2, metavar=("RUN", "SEED"), help="only this run, in this process")
    options, overrides = parser.parse_known_args()
    place = lambda name, seed: options.out / f"{name}_{seed}"  # noqa: E731
    if options.one:
        name, seed = options.one
        run_one(place(name, seed).resolve(), [*settings(name, int(seed), options.steps), *overrides])
        return

    def finished(job: tuple[str, int]) -> None:
        name, seed = job
        if options.steps in curve(place(*job)):
            return
        command = [sys.executable, "-m", "benchmarks.think_then_draw", "--out", str(options.out)]
        command += ["--steps", str(options.steps), "--one", name, str(seed), *overrides]
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / f"{name}_{seed}.log").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode:
                raise RuntimeError(f"the run in {place(*job)} failed: {log.name} says why")

    jobs = [(name, seed) for name in options.runs for seed in options.seeds]
    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(finished, jobs))
    found = {name: [curve(place(name, seed)) for seed in options.seeds] for name in options.runs}
    print(table(found))
    if options.json:
        timed = {name: [seconds(place(name, seed)) for seed in options.seeds] for name in options.runs}
        told = {"scores": found, "seconds_a_step": timed, "seeds": options.seeds}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
