"""What a slow reward costs: a reward as slow as generation, computed while other images are drawn.

    python -m benchmarks.reward_overlap --out outputs/reward_overlap [--steps 6]

The quickstart's model and prompts, drawn in many forwards. First with a reward that costs nothing: the time of
generation. Then with one that takes as long for all images of a step as their generation took. Beside it stands what
the two would take one after the other.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from verl_omni.utils.run_files import read_metrics

WARM_UP = 1  # steps that are not counted
FORWARDS = 12  # of a step's rollout
REWARD = Path(__file__).with_name("slow_reward.py")


def seconds_of(out: Path, name: str, steps: int, each: float) -> tuple[float, int]:
    """(median seconds from the first request of a step to its last score, images of a step)."""
    from verl_omni.quickstart.__main__ import training_command

    run_dir = out / name
    command = training_command(
        out,
        run_dir,
        [
            f"reward.custom_reward_function.path={REWARD}",
            f"reward.custom_reward_function.reward_kwargs={{seconds: {each}}}",
            f"actor_rollout_ref.rollout.max_num_seqs={max(1, images_of_a_step() // FORWARDS)}",
            f"trainer.total_training_steps={steps}",
            *("trainer.val_before_train=false", "trainer.test_freq=0", "trainer.save_freq=0"),
            "trainer.resume_mode=disable",
        ],
    )
    if subprocess.run(command).returncode:
        sys.exit(f"error: the run in {run_dir} failed")
    rows = [entry["data"] for entry in read_metrics(run_dir / "metrics.jsonl")][WARM_UP:]
    taken = [row["timing_s/gen"] + row["timing_s/reward"] for row in rows]
    return statistics.median(taken), int(rows[0]["perf/total_num_images"])


def images_of_a_step() -> int:
    import yaml

    from verl_omni.quickstart.__main__ import RECIPE

    recipe = yaml.safe_load((Path(RECIPE) / "quickstart.yaml").read_text())
    return recipe["data"]["train_batch_size"] * recipe["actor_rollout_ref"]["rollout"]["n"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=6, help="training steps of each (%(default)s)")
    options = parser.parse_args()
    alone, images = seconds_of(options.out, "free", options.steps, 0.0)
    slow, _ = seconds_of(options.out, "slow", options.steps, alone / images)
    print("\n| | s a step | against generation |\n|---|---|---|")
    for name, seconds in (("generation", alone), ("with the reward, overlapped", slow), ("in turn", 2 * alone)):
        print(f"| {name} | {seconds:.2f} | {seconds / alone:.2f} |")


if __name__ == "__main__":
    main()
