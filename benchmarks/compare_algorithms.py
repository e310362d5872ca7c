"""Algorithms side by side on the quickstart's task: held-out score against images drawn and against time.

    python -m benchmarks.compare_algorithms --out outputs/compare [--seeds 0 1 2]

Each run is the real command with the quickstart's recipe and the settings below. Runs that are already whole are not
repeated. Prints a table in Markdown.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from verl_omni.utils.run_files import read_metrics

SCORE = "val-core/"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
OWN_STEPS = [f"{ROLLOUT}.algo.sde_type=null", f"{ROLLOUT}.algo.noise_level=null"]  # what the algorithm itself chooses
SINGLE_STEPS = [*OWN_STEPS, "algorithm.timesteps_per_sample=3"]  # of the forward process; the rollout is an ODE
ALGORITHMS: dict[str, tuple[str, list[str]]] = {
    "flow_grpo": ("flow_grpo", []),
    "flow_grpo fast": ("flow_grpo", [f"{ROLLOUT}.algo.sde_window_size=1", f"{ROLLOUT}.algo.sde_window_per_group=true"]),
    "mix_grpo": ("mix_grpo", [*OWN_STEPS, f"{ROLLOUT}.algo.sde_window_size=2"]),
    "dance_grpo": ("dance_grpo", OWN_STEPS),
    "grpo_guard": ("grpo_guard", []),
    "flow_dppo": ("flow_dppo", []),
    "tempflow_grpo": ("tempflow_grpo", []),
    "flash_grpo": ("flash_grpo", [f"{ROLLOUT}.algo.sde_window_size=1"]),
    "diffusion_nft": ("diffusion_nft", [*SINGLE_STEPS, f"{ACTOR}.diffusion_loss.adv_clip_max=1"]),
    "awm": ("awm", SINGLE_STEPS),
    "dpo": ("dpo", SINGLE_STEPS),
    "dgpo": ("dgpo", SINGLE_STEPS),
    "crd": ("crd", SINGLE_STEPS),
}


def settings(name: str, seed: int, steps: int) -> list[str]:
    """Overrides of the quickstart's recipe. Validation draws the same images for every seed."""
    algorithm, particular = ALGORITHMS[name]
    seeds = ("trainer.seed", "data.seed", f"{ROLLOUT}.seed", f"{ACTOR}.engine.seed")
    return [
        f"actor_rollout_ref.model.algorithm={algorithm}",
        *particular,
        *(f"{name}={seed}" for name in seeds),
        f"{ACTOR}.ema_decay=0",  # the score of the last weights, not of their average
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={max(1, steps // 2)}",
        "trainer.save_freq=0",
    ]


def curve(run_dir: Path) -> dict[int, tuple[float, int, float]]:
    """Step -> (held-out score, images drawn for training so far, seconds: so many steps of the median length)."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    step_time = statistics.median([r["data"]["timing_s/step"] for r in rows if "timing_s/step" in r["data"]] or [0.0])
    found, images = {}, 0
    for row in rows:
        images += row["data"].get("perf/total_num_images", 0)
        scores = [v for k, v in row["data"].items() if k.startswith(SCORE)]
        if scores:
            found[row["step"]] = (scores[0], int(images), row["step"] * step_time)
    return found


def table(curves: dict[str, list[dict[int, tuple[float, int, float]]]]) -> str:
    """A line for each algorithm: mean score over seeds (lowest to highest), and seconds of the least disturbed seed."""
    validated = next(iter(curves.values()))[0]
    lines = [
        "| algorithm | " + " | ".join(f"{images} images" for _, images, _ in validated.values()) + " |",
        "|---" * (len(validated) + 1) + "|",
    ]
    for algorithm, runs in curves.items():
        cells = []
        for step in validated:
            scores, _, seconds = zip(*(run[step] for run in runs), strict=True)
            spread = f" ({min(scores):.3f} to {max(scores):.3f}), {min(seconds):.0f} s" if step else ""
            cells.append(f"{statistics.mean(scores):.3f}{spread}")
        lines.append(f"| `{algorithm}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    from verl_omni.quickstart.__main__ import training_command

    curves: dict[str, list] = {}
    for algorithm in options.algorithms:
        for seed in options.seeds:
            run_dir = options.out / f"{algorithm.replace(' ', '_')}_{seed}"
            if not (run_dir / "metrics.jsonl").is_file() or options.steps not in curve(run_dir):
                command = training_command(options.out, run_dir, settings(algorithm, seed, options.steps))
                if subprocess.run(command).returncode:
                    sys.exit(f"error: the run in {run_dir} failed")
            curves.setdefault(algorithm, []).append(curve(run_dir))
    print(table(curves))


if __name__ == "__main__":
    main()
