"""Placement side by side: how long a step takes in each `trainer.mode`, with one core for training and one for rollout.

    python -m benchmarks.modes --out outputs/modes [--steps 12] [--servers 1 2] [--reward-seconds 4]

The quickstart's model and prompts, with more denoising steps than are trained, so that drawing and learning take about
equally long; the reward is brightness, which costs nothing, but comes late if asked to. Every process computes with one
thread: what a mode gains is then gained by doing two things at once, not by using more cores for one. Prints a table in
Markdown; "predicted" is what `verl-omni plan` makes of the run in turn (separate, one server).
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from verl_omni.utils.run_files import read_metrics

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
EQUALLY_LONG = [
    f"{ROLLOUT}.pipeline.num_inference_steps=5",
    f"{ROLLOUT}.algo.sde_window_size=3",
    f"{ROLLOUT}.algo.sde_window_range=[0,4]",
    f"reward.custom_reward_function.path={Path(__file__).with_name('brightness.py')}",
    "trainer.val_before_train=false",
    "trainer.test_freq=0",
    "trainer.save_freq=0",
    "trainer.resume_mode=disable",
]
MODES = ("colocated", "separate", "one_step_off", "fully_async")
IN_TURN = ("separate", 1)
WARM_UP = 2  # steps that are not counted


def stages(run_dir: Path) -> dict[str, float]:
    """Median seconds of the steps after the first ones."""
    rows = [entry["data"] for entry in read_metrics(run_dir / "metrics.jsonl")]
    rows = [row for row in rows if "timing_s/step" in row][WARM_UP:]
    names = ("step", "gen", "gen_images", "reward", "update_actor")
    return {name: statistics.median(row[f"timing_s/{name}"] for row in rows) for name in names}


def table(found: dict[tuple[str, int], dict[str, float]], predicted: dict[tuple[str, int], float]) -> str:
    """Against `separate` with one server, where the two take turns on the same devices."""
    lines = [
        "| mode | servers | s a step | drawing | waiting for it | rewards | update | against separate | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (mode, servers), s in found.items():
        ratio = f"{s['step'] / found[IN_TURN]['step']:.2f}" if IN_TURN in found else ""
        said = f"{predicted[mode, servers]:.2f}" if (mode, servers) in predicted else ""
        lines.append(
            f"| {mode} | {servers or '–'} | {s['step']:.2f} | {s['gen_images']:.2f} | {s['gen']:.2f} | "
            f"{s['reward']:.2f} | {s['update_actor']:.2f} | {ratio} | {said} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=12, help="training steps of each (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--servers", nargs="+", type=int, default=[1], help="rollout servers: runs with each number")
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="of the training config")
    parser.add_argument("--reward-seconds", type=float, help="how late each reward comes, as from a service elsewhere")
    options = parser.parse_args()
    late = []
    if options.reward_seconds:
        reward = "reward.custom_reward_function"
        late = [f"{reward}.name=late", f"++{reward}.reward_kwargs.seconds={options.reward_seconds}"]
    from verl_omni.perf.plan import read_work
    from verl_omni.quickstart.__main__ import training_command

    found, predicted = {}, {}
    for mode, servers in [(mode, n) for n in options.servers for mode in options.only]:
        if mode == "colocated" and ("colocated", 0) in found:
            continue
        folder, servers = options.out / f"{mode}-{servers}", 0 if mode == "colocated" else servers
        given = [*EQUALLY_LONG, *late, f"trainer.mode={mode}", f"trainer.total_training_steps={options.steps}"]
        given += [*([f"rollout.n_gpus_per_node={servers}"] if servers else []), *options.overrides]
        command = training_command(options.out, folder, given)
        print(f"{mode} {servers} ...", file=sys.stderr, flush=True)
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr, check=True)
        found[mode, servers] = stages(folder)
    if IN_TURN in found:
        work = read_work(options.out / "separate-1")
        predicted = {(mode, n): work.predict(mode, 1, n) for mode, n in found if n and (mode, n) != IN_TURN}
    print(table(found, predicted))


if __name__ == "__main__":
    main()
