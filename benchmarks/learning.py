"""What learns fastest? Algorithms side by side on a task: score against images drawn and against seconds.

    python -m verl_omni.tasks make scenes outputs/scenes
    python -m benchmarks.learning scenes --model outputs/scenes --out benchmarks/curves/scenes --parallel 16
    python -m benchmarks.learning scenes --model outputs/scenes --out benchmarks/curves/scenes --seeds 2 --best 5
    python -m benchmarks.learning scenes --out benchmarks/curves/scenes --table --figure docs/learning.svg \\
        --write docs/results.md

The same for `words`, which a real OCR reads, and with `signs` for `words` for scenes with up to three of them:

    python -m verl_omni.tasks make words outputs/words                        # 8 minutes for scenes, on an H200
    python -m benchmarks.learning words --model outputs/words --out benchmarks/curves/words --parallel 15 \\
        --seeds 0 1 --seconds 9 --every 3 --lr 2e-5
    python -m benchmarks.learning words --out benchmarks/curves/words --table --figure docs/learning_words.svg \\
        --write docs/results.md                                               # seconds, no GPU

With drawing in 8 bits, beside `flow_grpo`, into a table of its own (<!-- LEARNING words in 8 bits -->):

    python -m benchmarks.learning words --model outputs/words --out benchmarks/curves/words --parallel 8 \\
        --seeds 0 1 --seconds 9 --every 3 --lr 2e-5 --algorithms flow_grpo 'flow_grpo in 8 bits' \\
        'flow_grpo in 8 bits corrected' 'flow_grpo pool in 8 bits'

On an H200 a generator of words took 5 minutes beside three other programs. The minutes of its curves, and those of
signs, have not been measured. Each run reads its images on a core of its own: --parallel is at most the number of
cores. A call that was cut off is typed again, and goes on with the runs that are missing.

Every run is the real trainer's step with the task's recipe and the settings of RUNS, so many runs at once on one card.
Its early steps are timed while the others wait: seconds are those of a run that has the card to itself, so many as its
images take, whoever is beside it. Validation is not counted, nor what a step waits for its rewards after the drawing
(the last number of a step in a curve); a pool and groups that are filtered wait for theirs as they draw, which counts.
A run's curve is a small JSON file; runs whose file is there, of as many seconds or more, are not repeated, so a later
call adds to them. Every generator that is made is another one: curves of one folder are of one generator. After
`--within` seconds all runs validate and end, and no other is started; of a run that is killed the table counts the
points that it has left. Further arguments are overrides of the recipe; they come after an option that takes one value.
"""

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.compare_algorithms import ACTOR, ALGORITHMS, ROLLOUT
from benchmarks.learning_table import SO_FAR, YARDSTICK, best, figure, read_all, read_curves, report, search, write_into
from benchmarks.local_runs import Job, import_everything, run_all, write
from benchmarks.side_by_side import NOBODY_ELSE, Turns
from benchmarks.staleness import typed

FP8 = [f"{ROLLOUT}.precision=fp8"]
RUNS = ALGORITHMS | {
    "flow_grpo filtered": ("flow_grpo", ["algorithm.filter_groups.enable=true"]),
    "tempflow_grpo branching": ("tempflow_grpo", [f"{ROLLOUT}.algo.branches=4"]),
    "diffusion_nft pool": (
        "diffusion_nft",
        [*ALGORITHMS["diffusion_nft"][1], f"{ROLLOUT}.pool.size=48", f"{ROLLOUT}.pool.num_inference_steps=4"],
    ),
}

# The same with drawing in 8 bits, which a table of its own compares (`--algorithms`).
EIGHT_BITS = {
    "flow_grpo in 8 bits": ("flow_grpo", FP8),
    "flow_grpo in 8 bits corrected": ("flow_grpo", [*FP8, "algorithm.rollout_correction.rollout_is=step"]),
    "flow_grpo pool in 8 bits": ("flow_grpo", [f"{ROLLOUT}.pool.size=32", f"{ROLLOUT}.pool.precision=fp8"]),
}
CHOICES = RUNS | EIGHT_BITS

SEARCHED = "Where the runs end with each learning rate that was tried, from which the table takes the best:"
TIMED = range(2, 5)  # steps that are taken alone: the ones before them load kernels


def settings(task: str, model: Path, algorithm: str, seed: int, lr: float, more: list[str]) -> list[str]:
    """Overrides that make the run. Validation draws the same images for every seed."""
    from omegaconf import OmegaConf

    from verl_omni import tasks

    recipe = OmegaConf.to_container(OmegaConf.load(Path(tasks.__file__).with_name(f"{task}.yaml")))
    del recipe["defaults"], recipe["recipe"]
    name, particular = CHOICES[algorithm]
    seeds = ("trainer.seed", "data.seed", f"{ROLLOUT}.seed", f"{ACTOR}.engine.seed")
    return [
        *typed(recipe),
        f"actor_rollout_ref.model.path={model / 'model'}",
        f"data.train_files={model / 'train.jsonl'}",
        f"data.val_files={model / 'val.jsonl'}",
        f"actor_rollout_ref.model.algorithm={name}",
        *particular,
        *(f"{key}={seed}" for key in seeds),
        f"{ACTOR}.optim.lr={lr}",
        "trainer.total_training_steps=100000",
        "trainer.log_train_groups=0",
        "trainer.resume_mode=disable",
        "trainer.logger=[jsonl]",
        *more,
    ]


def learn(
    what: dict[str, Any],
    given: list[str],
    folder: str,
    seconds: float,
    every: float,
    most_steps: int,
    deadline: float = math.inf,
    turns: Turns = NOBODY_ELSE,
) -> dict[str, Any]:
    """Train for so long, validating every so many seconds of training: the curve, with `what` is said of the run."""
    import torch

    from verl_omni.tasks import find_task
    from verl_omni.testing.local_trainer import local_config, local_trainer

    torch.set_float32_matmul_precision("high")  # the same as elsewhere on a CPU
    run_dir, task = Path(folder), find_task(what["task"])
    with turns.together():
        trainer = local_trainer(local_config([*given, f"trainer.default_local_dir={run_dir}"]))
    trainer.pace, n = trainer.new_pace(), trainer.config.actor_rollout_ref.rollout.n
    points, steps = [], []
    while True:
        images, trained = sum(step[1] for step in steps), seconds_alone(steps)
        whole = trained >= seconds or trainer.global_step >= most_steps
        done = whole or time.monotonic() > deadline
        if done or trained >= every * len(points):
            with turns.together():
                trainer.validate()
            kept = run_dir / "validation" / f"step_{trainer.global_step}"
            told = look_back(task, kept)
            points.append({"step": trainer.global_step, "images": images, "seconds": round(trained, 2), **told})
            print(points[-1], flush=True)
            shutil.rmtree(kept)
            curve = {**what, "device": device_name(), "whole": whole, "points": points, "steps": steps}
            write(run_dir / SO_FAR, curve)
        if done:
            if len(points) == 1:
                raise TimeoutError("no time was left to train")
            return curve
        with turns.alone() if len(steps) in TIMED else turns.together():
            began, timing = time.perf_counter(), {}
            batch, metrics = trainer.training_step(trainer.pace, timing)
            waited = timing["reward"]
            took = time.perf_counter() - began - waited
        trainer.global_step += 1
        drawn = metrics.get("filter_groups/drawn", 0) * n or len(batch)
        drawn = int(drawn + metrics.get("pool/drawn", 0))
        steps.append([round(took, 3), drawn, round(batch.batch["rm_scores"].nanmean().item(), 4), round(waited, 3)])
        print(f"step {trainer.global_step}: {steps[-1]}", flush=True)


def seconds_alone(steps: list[list[float]]) -> float:
    """What all images of these steps take without neighbours, by the steps that had none; 0 until there are such."""
    timed = steps[TIMED.start : TIMED.stop]
    took, images = (sum(step[i] for step in timed) for i in (0, 1))
    return took / images * sum(step[1] for step in steps) if timed else 0.0


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def look_back(task: Any, folder: Path) -> dict[str, Any]:
    """Of a validation's images: the score, by tag where there are tags, a second score, and how much images of a prompt
    differ."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    counted, second, by_tag = [], [], {}
    pictures: dict[str, list] = {}
    for row in rows:
        told = row["reward_extra_info"]
        counted.append(told.get(task.COUNTED, row["score"]))
        second.append(told[task.SECOND])
        by_tag.setdefault(told.get("tag", "all"), []).append(counted[-1])
        pictures.setdefault(row["prompt"], []).append(folder / row["image"])
    tags = {tag: round(fmean(values), 4) for tag, values in by_tag.items()}
    return {
        "score": round(fmean(tags.values()), 4),
        **({"tags": tags} if len(tags) > 1 else {}),
        "reward": round(fmean(row["score"] for row in rows), 4),
        "second": round(fmean(second), 4),
        "diversity": round(diversity(pictures), 4),
    }


def diversity(pictures: dict[str, list[Path]]) -> float:
    """Mean distance of two images of a prompt, each seen at a quarter of its size."""
    import numpy as np
    from PIL import Image

    from verl_omni.utils.diversity import mean_distance

    small = [[np.asarray(Image.open(file).convert("RGB").reduce(4)) for file in files] for files in pictures.values()]
    return mean_distance(small) or 0.0


def show(folder: Path, task: str, to_figure: Path | None, document: Path | None) -> None:
    """The table of a task; drawing in 8 bits, where it was run, has another, beside the same in full."""
    tables = {task: list(RUNS), f"{task} in 8 bits": [YARDSTICK, *EIGHT_BITS]}
    curves, tried = read_curves(folder, task), read_all(folder, task)
    for title, names in tables.items():
        if title != task and not curves.keys() & EIGHT_BITS.keys():
            continue
        own = {name: runs for name, runs in curves.items() if name in names}
        of_these = {name: runs for name, runs in tried.items() if name in names}
        told = report(own, names)
        if any(len(rates) > 1 for rates in of_these.values()):
            told += f"\n\n{SEARCHED}\n\n{search(of_these)}"
        print(f"{title}\n{told}\n")
        if document:
            write_into(document, told, title)
        if to_figure and title == task:
            to_figure.write_text(figure(own))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["scenes", "words", "signs"])
    parser.add_argument("--model", type=Path, help="folder that `python -m verl_omni.tasks make` has written")
    parser.add_argument("--out", type=Path, required=True, help="folder of the curves")
    parser.add_argument("--algorithms", nargs="+", default=list(RUNS), choices=list(CHOICES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--lr", nargs="+", type=float, help="learning rates, each of which is tried (2e-5)")
    parser.add_argument("--best", type=int, help="only so many of the algorithms, whose curves there end highest, each "
                        "with its best rate")  # fmt: skip
    parser.add_argument("--parallel", type=int, default=1, help="runs at once (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30, help="of training, each run (%(default)s)")
    parser.add_argument("--every", type=float, default=5, help="seconds of training between validations (%(default)s)")
    parser.add_argument("--steps", type=int, default=10**6, help="a run ends after so many (%(default)s)")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds for all runs together (%(default)s)")
    parser.add_argument("--table", action="store_true", help="run nothing; print the table of what is there")
    parser.add_argument("--figure", type=Path, help="with --table: an SVG to write")
    parser.add_argument("--write", type=Path, help="with --table: a document whose <!-- LEARNING TASK --> is filled")
    options, more = parser.parse_known_args()
    if options.table:
        try:
            show(options.out, options.task, options.figure, options.write)
        except ValueError as error:
            sys.exit(f"error: {error}")
        return
    if options.model is None:
        parser.error("--model is needed: python -m verl_omni.tasks make scenes FOLDER")
    deadline = time.monotonic() + options.within
    if options.best is not None:
        if options.lr:
            parser.error("--best takes the rate of each from its curves: leave --lr out")
        curves = {name: runs for name, runs in read_curves(options.out, options.task).items() if name in RUNS}
        chosen = [(name, curves[name][0]["lr"]) for name in best(curves)[: options.best]]
        if not chosen:
            parser.error(f"--best: {options.out} has no curves of {options.task} yet")
    else:
        chosen = [(name, lr) for lr in options.lr or [2e-5] for name in options.algorithms]
    import_everything()
    scratch = options.out / "runs"
    scratch.mkdir(parents=True, exist_ok=True)
    jobs = []
    limits = (options.seconds, options.every, options.steps, deadline, Turns(scratch))
    for seed in options.seeds:
        for algorithm, lr in chosen:
            given = settings(options.task, options.model, algorithm, seed, lr, more)
            name = f"{algorithm.replace(' ', '_')}_lr{lr:g}_seed{seed}"
            what = {"task": options.task, "algorithm": algorithm, "lr": lr, "seed": seed, "settings": more}
            what |= {"parallel": options.parallel, "asked": options.seconds}
            one = (what, given, str(scratch / name), *limits)
            jobs.append(Job(options.out / f"{name}.json", learn, one, options.seconds))
    failed = run_all(jobs, options.parallel, deadline)
    for job in jobs:
        if job.file.exists():  # what other runs have left there counts
            shutil.rmtree(scratch / job.file.stem, ignore_errors=True)
    if failed:
        sys.exit(f"error: failed, and their .log files say why: {', '.join(map(str, failed))}")


if __name__ == "__main__":
    main()
