"""Runs of one task side by side, with some seeds each. Which ones is said by the scripts of tasks.

Each run is the real trainer in a process of its own, on the CPU and on one thread. Curves are kept as small JSON files;
what is there is not repeated.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.local_runs import FORK, Job, import_everything, run_all
from verl_omni.utils.run_files import read_metrics

SEEDS = ("trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.engine.seed")
Scores = dict[int, float]
Start = Callable[[Path], list[str]]


def settings(seed: int, steps: int) -> list[str]:
    """What all runs share."""
    return [
        *(f"{knob}={seed}" for knob in SEEDS),
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={max(1, steps // 5)}",
        "trainer.save_freq=0",
        "trainer.resume_mode=disable",
        "trainer.log_val_images=8",
        "trainer.device=cpu",
    ]


def run_one(task: str | Start, folder: Path, overrides: list[str]) -> None:
    """One run in this process, without Ray."""
    from hydra import compose, initialize_config_dir

    from verl_omni.config import schema
    from verl_omni.quickstart.__main__ import RECIPE, training_command
    from verl_omni.testing.local_trainer import local_config, local_trainer
    from verl_omni.trainer.checks.preflight import preflight

    if isinstance(task, str):
        schema.register()
        command = training_command(folder.parent / f"data_{folder.name}", folder, overrides, task)
        search = "hydra.searchpath=[pkg://verl_omni.trainer.config]"
        with initialize_config_dir(str(RECIPE), version_base=None):
            config = preflight(compose(task, [search, *command[command.index("--config-name") + 2 :]]))
    else:
        config = local_config([*task(folder.parent), f"trainer.default_local_dir={folder}", *overrides])
    local_trainer(config).fit()


def train(task: str | Start, folder: str, overrides: list[str]) -> dict[str, Any]:
    run_one(task, Path(folder), overrides)
    rows = read_metrics(Path(folder) / "metrics.jsonl")
    seconds = [row["data"]["timing_s/step"] for row in rows if "timing_s/step" in row["data"]]
    return {"settings": overrides, "scores": curve(Path(folder)), "seconds_a_step": statistics.median(seconds)}


def curve(run_dir: Path) -> Scores:
    """Step -> held-out score."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    scores = {row["step"]: [v for k, v in row["data"].items() if k.startswith("val-core/")] for row in rows}
    return {step: found[0] for step, found in scores.items() if found}


def table(found: dict[str, list[Scores]]) -> str:
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


def compare(
    task: str | Start,
    runs: dict[str, list[str]],
    steps: int,
    doc: str,
    prepare: Callable[[Path], None] = lambda folder: None,
) -> None:
    """The command of a task's script. `task` is one of the quickstart's, or says the settings of a run in a folder.

    `prepare` writes there what all runs need.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--runs", nargs="+", default=list(runs), choices=list(runs))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=steps, help="of each run (%(default)s)")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, a core each")
    overrides = [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
    options = parser.parse_args([word for word in sys.argv[1:] if word not in overrides])
    import_everything()
    out, files, given_to, jobs = options.out.resolve(), {}, {}, []
    out.mkdir(parents=True, exist_ok=True)
    first = FORK.Process(target=prepare, args=(out,))  # the others are forks of this one, which is to have no threads
    first.start()
    first.join()
    if first.exitcode:
        sys.exit(f"error: what the runs need could not be written to {out}: see above")
    for name in options.runs:
        for seed in options.seeds:
            files[name, seed] = out / f"{name}_{seed}_{options.steps}.json"
            given = [*runs[name], *settings(seed, options.steps), *overrides]
            given_to[files[name, seed]] = given
            jobs.append(Job(files[name, seed], train, (task, str(out / f"{name}_{seed}"), given)))
    failed = run_all(jobs, options.parallel)
    if failed:
        sys.exit(f"error: failed, and their .log files say why: {', '.join(map(str, failed))}")
    found: dict[str, list[Scores]] = {}
    for (name, _), file in files.items():
        told = json.loads(file.read_text())
        if told["settings"] != given_to[file]:
            sys.exit(f"error: {file} is of a run with other settings: choose another --out, or remove it")
        found.setdefault(name, []).append({int(step): score for step, score in told["scores"].items()})
    print(table(found))
