"""Runs that do not learn, made on purpose on the quickstart's task: what each shows, and what the console says of it.

    python -m benchmarks.symptoms --out outputs/symptoms --parallel 2 [--only "low noise"]

Each row of docs/debugging.md is such a run, in one process with one thread; beside some is the same run with a remedy.
Prints a table in Markdown: the metric in the run that was spoiled and in the recipe as it is shipped, how well an OCR
reads validation's images at first and at last, and the words on the console.
"""

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image

from benchmarks.compare_algorithms import ACTOR, ROLLOUT
from benchmarks.local_runs import Job, import_everything, run_all
from benchmarks.staleness import quickstart_settings, write_order
from verl_omni.rewards.differentiable import differentiable
from verl_omni.utils.run_files import read_metrics

SCORE = "val-core/ocr_line/reward/mean@1"
SHIPPED = "as shipped"
BEHIND = 4  # steps, in the run with old samples
DISAGREES = "training disagrees"
OWN_REWARD = "reward.custom_reward_function"


@dataclass(frozen=True)
class Spoiled:
    """How a run is spoiled, the metric that shows it, and words of the console; none: it does not warn."""

    settings: list[str]
    metric: str
    words: str
    steps: int = 25


def reward(name: str) -> list[str]:
    return [f"{OWN_REWARD}.path=pkg://benchmarks.symptoms", f"{OWN_REWARD}.name={name}"]


COMPRESSIBLE = ["reward.scorers=[{name: jpeg_compressibility}, {name: ocr_line, weight: 1e-6}]"]
GRADIENT = [  # up the gradient of a reward that has nothing to do with what is written
    "actor_rollout_ref.model.algorithm=draft",
    *(f"{ROLLOUT}.{one}" for one in ("algo.sde_type=ode", "algo.noise_level=0", "n=2")),
    *reward("bright"),
]

ROWS = {
    "flat reward": Spoiled(
        [f"{ACTOR}.optim.lr=1e-8"], "critic/rewards/mean", "the reward stays where it is", steps=30
    ),
    "collapse": Spoiled([f"{ACTOR}.optim.lr=5e-3"], "critic/rewards/mean", "nearly every ratio is clipped"),
    "hacking": Spoiled(COMPRESSIBLE, "reward/ocr_line/mean", 'gets better while "ocr_line" gets worse'),
    "hacking near the reference": Spoiled(
        [*COMPRESSIBLE, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=1"], "reward/ocr_line/mean", ""
    ),
    "hacking with an average": Spoiled([*COMPRESSIBLE, f"{ACTOR}.ema_decay=0.9"], "reward/ocr_line/mean", ""),
    "reward gradient": Spoiled(GRADIENT, "critic/diversity", "the images of each prompt become alike"),
    "reward gradient near the reference": Spoiled(
        [*GRADIENT, f"+{ACTOR}.diffusion_loss.extra.kl_beta=0.1"], "critic/diversity", ""
    ),
    "all groups equal": Spoiled(
        reward("constant"), "critic/rewards/zero_std_ratio", "the images of each prompt all have the same reward", 5
    ),
    "most groups equal": Spoiled(
        [*reward("all_or_nothing"), f"{ROLLOUT}.n=4"],
        "critic/rewards/zero_std_ratio",
        "the images of most prompts score the same",
        10,
    ),
    "narrow clip": Spoiled(
        [f"{ACTOR}.diffusion_loss.clip_ratio=1e-6"], "actor/pg_clipfrac", "nearly every ratio is clipped", 10
    ),
    "high learning rate": Spoiled(  # a reward that tells ruined images apart: where all score 0 there is no gradient
        [f"{ACTOR}.optim.lr=2e-2", f"{ACTOR}.optim.clip_grad=0", "reward.scorers=[{name: jpeg_compressibility}]"],
        "actor/grad_norm",
        "the gradient explodes",
        15,
    ),
    "high noise": Spoiled(
        [f"{ROLLOUT}.algo.noise_level=3", "trainer.test_freq=5"],
        "critic/rewards/mean",
        "training's images score far below validation's",
        10,
    ),
    "low noise": Spoiled(
        [f"{ROLLOUT}.algo.noise_level=0.02"], "actor/pg_clipfrac", "nearly every ratio is clipped", 10
    ),
    "guidance": Spoiled([f"{ROLLOUT}.pipeline.true_cfg_scale=4"], "timing_s/step", "", 10),
    "old samples": Spoiled(
        ["trainer.mode=fully_async", f"trainer.max_staleness={BEHIND}"],
        "staleness/mean",
        "samples are old and their ratios are clipped",
        12,
    ),
    "saturated reward": Spoiled(  # one of two: alone it is equal groups, which end a run before
        [*reward("anything"), "reward.scorers=[{name: ocr_line}, {name: custom_reward_function, label: anything}]"],
        "reward/anything/zero_std_ratio",
        "it has nothing more to teach",
        12,
    ),
    "small groups": Spoiled(
        ["data.train_batch_size=48", f"{ROLLOUT}.n=2", f"{ACTOR}.ppo_mini_batch_size=24"],
        "critic/rewards/group_size",
        "groups are small",
        10,
    ),
    DISAGREES: Spoiled([], "actor/first_ratio_max_dev", "the two compute different steps", 1),
    SHIPPED: Spoiled([], SCORE, "", steps=30),
}


def constant(solution_image: Any) -> float:
    """A reward that cannot tell images apart."""
    return 0.5


def all_or_nothing(images: list, ground_truths: list[str]) -> list[float]:
    """Right or wrong, and nothing between."""
    from verl_omni.rewards.scorers.ocr import compute_score_ocr_line

    return [float(answer["exact"]) for answer in compute_score_ocr_line(images, ground_truths)]


@differentiable
def bright(pixels: torch.Tensor) -> torch.Tensor:
    """How white an image is."""
    return pixels.mean(dim=(1, 2, 3))


def anything(images: list, ground_truths: list[str]) -> list[float]:
    """1 for every image with anything on it."""
    return [float(image.convert("L").getextrema()[0] < 250) for image in images]


def train(name: str, out: str, more: list[str]) -> dict[str, Any]:
    from verl_omni.report.notices import read_notices
    from verl_omni.testing.local_trainer import local_config, local_trainer
    from verl_omni.utils.errors import RunError

    row, run_dir = ROWS[name], Path(out) / "runs" / name.replace(" ", "_")
    if name == DISAGREES:
        disagree()
    replay = []
    if name == "old samples":
        order = Path(out) / "order"
        write_order(order, BEHIND, row.steps, batch_size=6)
        replay = [f"trainer.replay={order}"]
    shutil.rmtree(run_dir, ignore_errors=True)
    given = [
        *quickstart_settings(Path(out)),
        f"trainer.total_training_steps={row.steps}",
        "trainer.test_freq=10",
        "trainer.save_freq=0",
        "trainer.resume_mode=disable",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={run_dir}",
        *row.settings,
        *replay,
        *more,
    ]
    ended = ""
    try:
        local_trainer(local_config(given)).fit()
    except (RunError, FloatingPointError) as error:
        ended = str(error)
    metrics = [line["data"] for line in read_metrics(run_dir / "metrics.jsonl")]
    kept = {one.metric for one in ROWS.values()}
    steps = [{key: value for key, value in line.items() if key in kept} for line in metrics]
    told = {"name": name, "steps": steps, "notices": read_notices(run_dir), "ended": ended}
    return told | {"read": {folder.name: readable(folder) for folder in (run_dir / "validation").iterdir()}}


def disagree() -> None:
    """In this process: an adapter whose velocities are a hundredth longer where it is trained than where it draws."""
    from verl_omni.pipelines.qwen_image.adapter import QwenImage

    predict = QwenImage.predict_velocity

    def longer(*given: Any, **named: Any) -> torch.Tensor:
        return predict(*given, **named) * (1.01 if torch.is_grad_enabled() else 1.0)

    QwenImage.predict_velocity = longer


def readable(validation: Path) -> float:
    """How well an OCR reads the images of a validation, whatever they were scored by."""
    from verl_omni.rewards.scorers.ocr import compute_score_ocr_line

    rows = [json.loads(line) for line in (validation / "samples.jsonl").read_text().splitlines()]
    images = [Image.open(validation / row["image"]).convert("RGB") for row in rows]
    return fmean(answer["score"] for answer in compute_score_ocr_line(images, [row["ground_truth"] for row in rows]))


def course(steps: list[dict[str, float]], metric: str) -> str:
    """The metric at first and at last, means of up to three steps each."""
    values = [step[metric] for step in steps if metric in step]
    if not values:
        return ""
    first, last = fmean(values[:3]), fmean(values[-3:])
    return f"{first:.3g} → {last:.3g}"


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = ["| run | spoiled by | metric | there | as shipped | OCR | the console |", "|---" * 7 + "|"]
    for name, told in found.items():
        row = ROWS[name]
        said = [line for line in words_of(told) if row.words and row.words in line]
        shown = said[0] if said else f"NOT SAID: {row.words}" if row.words else "; ".join(told["notices"])
        shipped = course(found[SHIPPED]["steps"], row.metric) if SHIPPED in found else ""
        settings = ", ".join(f"`{setting.removeprefix('actor_rollout_ref.')}`" for setting in row.settings)
        there = course(told["steps"], row.metric)
        read = [told["read"][step] for step in sorted(told["read"], key=lambda name: int(name.split("_")[1]))]
        legible = f"{read[0]:.2f} → {read[-1]:.2f}"
        lines.append(f"| {name} | {settings} | `{row.metric}` | {there} | {shipped} | {legible} | {shown} |")
    return "\n".join(lines)


def was_said(name: str, told: dict[str, Any]) -> bool:
    return not ROWS[name].words or any(ROWS[name].words in line for line in words_of(told))


def words_of(told: dict[str, Any]) -> list[str]:
    """What a run said while it went on, and what ended it."""
    return [*told["notices"], told["ended"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--parallel", type=int, default=1, help="runs at once (%(default)s)")
    options, more = parser.parse_known_args()
    from verl_omni.quickstart.data import write_data

    write_data(options.out)
    import_everything()
    files = {name: options.out / f"{name.replace(' ', '_')}.json" for name in options.only}
    jobs = [Job(file, train, (name, str(options.out), more)) for name, file in files.items()]
    failed = run_all(jobs, options.parallel)
    if failed:
        sys.exit(f"error: failed, and their .log files say why: {', '.join(map(str, failed))}")
    found = {name: json.loads(file.read_text()) for name, file in files.items()}
    print(table(found))
    if silent := [name for name, told in found.items() if not was_said(name, told)]:
        sys.exit(f"error: the console did not say what it should of {', '.join(silent)}")


if __name__ == "__main__":
    main()
