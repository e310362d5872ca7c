"""What training needs at real size, measured on one H200 in few minutes, the most telling first.

    python -m benchmarks.scale --out found                       # needs an H200: all of it
    python -m benchmarks.scale ranks offload --out found --minutes 4
    python -m benchmarks.scale --few-layers --out found          # real widths, few layers, on a CPU: does it all fit?
    python -m benchmarks.scale --small --out found               # tiny models through the same code, on a CPU

words, signs: the generators of those tasks, which are made while the others compile. models: architectures at their
size. fp8: rollouts in 8 bits, and the same without. ranks: one rank of many (benchmarks.fake_ranks), and one of one
beside it. veomni: its update beside FSDP2's. plan: settings for the table of docs/plan.md. budget: half of the
activations kept, beside checkpointing and beside all of them. offload: all weights of the largest model whose optimizer
fits into the host. sizes: large images, small groups, many steps. video: a long one. update: a micro-batch that the run
finds, and profiles. again: what docs/performance.md has already.

Settings compile beside each other and are timed alone (benchmarks.side_by_side). Figures are in found/found.json after
each, what each printed in found/logs. The same command again measures what is missing there. It ends with an error
where a setting has no figures. Then, without a GPU, into the tables of docs, where they stay:

    python -m benchmarks.scale --out found --write docs/performance.md docs/plan.md
    python -m benchmarks.plan_check --json found/plan.json --write docs/plan.md
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import fake_ranks, measured, models, scale_tables
from benchmarks.plan_check import CASES, LARGEST, STAGES, Case
from benchmarks.side_by_side import Setting, Turns, run_all
from benchmarks.sweep import import_everything, square, two_steps

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VEOMNI = [f"{ACTOR}.strategy=veomni"]
ON_A_CPU = [
    f"{ROLLOUT}.pipeline.num_inference_steps=4", f"{ACTOR}.engine.use_torch_compile=false",
    f"{ACTOR}.engine.compile_ahead=false", f"{ACTOR}.engine.dtype=bfloat16",
    f"{ACTOR}.engine.activation_memory_budget=1",
]  # fmt: skip
UNTOLD = ("words", "signs")  # their figures go with the models that they make
VIDEOS = ("wan", "ltx2")
SMALLER = {"small": (32, 4), "few layers": (64, 2)}  # pixels, which the real VAEs divide, and images


def rank(
    name: str, gib: float, work: str, ranks: int, lora: int, overrides: list[str], rows: int = 8
) -> Setting:
    return Setting(name, gib, fake_ranks.measure, (work, ranks, rows, lora, overrides))


def step(name: str, gib: float, work: str, images: int, overrides: list[str]) -> Setting:
    return Setting(name, gib, metrics, (work, images, overrides))


def metrics(work: str, images: int, overrides: list[str], turns: Turns) -> dict[str, Any]:
    """Of the second step of a run without Ray."""
    trainer, found = two_steps(work, images, overrides, turns)
    shown = ("timing_s/", "perf/", "first step", "build", "actor/first_ratio_max_dev", "actor/rollout_ratio")
    kept = {name: value for name, value in found.items() if name.startswith((*shown, "rollout_corr/"))}
    stages = sum(found.get(f"timing_s/{stage}", 0.0) for stage in STAGES)
    return kept | {"images/s": images / found["timing_s/step"], "peak GiB": found.get("perf/max_memory_allocated_gb"),
                   "step s": found["timing_s/step"], "stages s": stages, "images": images,
                   "attention": trainer.actor_wg.engine.attention}  # fmt: skip


def of_plan(case: Case, gib: float) -> Setting:
    if case.ranks:
        return rank(case.title, gib, case.work, case.ranks, case.lora, case.overrides, case.images)
    return step(case.title, gib, case.work, case.images, case.overrides)


def named(work: str, name: str, gib: float) -> Setting:
    return of_plan(next(case for case in CASES if (case.work, case.name) == (work, name)), gib)


def profile(gib: float, work: str, images: int, part: str = "update") -> Setting:
    return Setting(f"profile of {part}: {work}", gib, profiled, (work, part, images, []))


def profiled(work: str, part: str, images: int, overrides: list[str], turns: Turns) -> dict[str, float]:
    """Seconds of the stages; the profile is in the log, and a trace beside the figures."""
    from benchmarks import profile_update

    out = turns.folder / "profiles" / f"{work}_{part}"
    out.mkdir(parents=True, exist_ok=True)
    return profile_update.profiled(work, images, out, overrides, turns, part)


def generator(task: str, gib: float, seconds: float) -> Setting:
    return Setting(f"the generator of {task}", gib, make, (task, seconds, False), 2 * seconds + 200)


def make(task: str, seconds: float, small: bool, turns: Turns) -> dict[str, Any]:
    """Into a folder beside the figures: `python -m verl_omni.tasks make`, a step whenever nobody is timed."""
    import torch

    from verl_omni.tasks import find_task
    from verl_omni.tasks.generator import SMALL, make_generator, size_of, write_rows

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        with turns.together():
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    module, folder = find_task(task), turns.folder / task
    size = SMALL if small else size_of(module)
    make_generator(module, folder / "model", size, seconds, target=0.6, turn=turn)
    write_rows(module, folder)
    return json.loads((folder / "model/recipe.json").read_text())


AWAY = [case for case in CASES if LARGEST in case.name]
# The memory is what `plan` says and a tenth and some GiB more, for gaps between tensors: what needs more ends.
GROUPS: dict[str, list[Setting]] = {
    "words": [generator("words", 12, 240.0)],
    "models": [
        named("wan-ti2v-5b", "LoRA, micro-batch 4, 49 frames", 80),
        named("glm-image", "LoRA, micro-batch 4", 32),
        named("flux2-dev", "LoRA, micro-batch 4, checkpointing", 78),
        named("qwen-image-edit", "LoRA, micro-batch 2, checkpointing", 81),
    ],
    "fp8": [
        named("sd35m", "88 images, rollout and reference in 8 bits", 79),
        named("z-image", "in 8 bits", 40),
        named("z-image", "in 8 bits, corrected", 40),
        named("flux-dev", "in 8 bits", 62),
        named("z-image", "LoRA, micro-batch 4", 40),
        named("flux-dev", "LoRA, micro-batch 4", 62),
        named("wan-1.3b", "in 8 bits", 61),
        named("wan-1.3b", "LoRA, micro-batch 4, 17 frames", 61),
    ],
    "ranks": [
        named("flux-dev", "LoRA, folded, rank 0 of 8", 36),
        named("flux-dev", "LoRA, folded, rank 0 of 1", 42),
        named("qwen-image", "full, rank 0 of 16, by blocks", 36),
        named("qwen-image", "full, rank 0 of 64, by blocks", 24),
        named("flux-dev", "LoRA, folded, rank 0 of 8 in two copies", 40),
        named("qwen-image", "full, rank 0 of 8, by blocks", 60),
    ],
    "veomni": [
        named("qwen-image", "LoRA, rank 0 of 8", 55),
        rank("qwen-image: LoRA, rank 0 of 8, VeOmni", 55, "qwen-image", 8, 64, VEOMNI),
        rank("qwen-image: full, rank 0 of 8, VeOmni", 94, "qwen-image", 8, 0, VEOMNI),
    ],
    "plan": [
        named("sd35m", "full, micro-batch 16, checkpointing, offload", 25),
        named("flux-dev", "LoRA, micro-batch 8, checkpointing", 43),
        named("flux2-klein", "full, micro-batch 4, checkpointing", 78),
        named("z-image", "LoRA, micro-batch 8", 64),
        named("wan-1.3b", "full, micro-batch 2, checkpointing", 50),
        named("sd35m", "LoRA, micro-batch 8, 1024 x 1024", 62),
        named("sd35m", "full, micro-batch 8, not compiled", 95),
        named("qwen-image", "LoRA, micro-batch 4, 1024 x 1024, checkpointing", 86),
        named("z-image", "full, micro-batch 4, checkpointing, offload", 72),
    ],
    "budget": [
        named("qwen-image", "LoRA, micro-batch 8, memory budget 0.5", 96),
        named("qwen-image", "LoRA, micro-batch 8, folded", 122),
        named("qwen-image", "LoRA, micro-batch 8, checkpointing", 96),
        named("sd35m", "LoRA, micro-batch 44, memory budget 0.5", 58),
        named("sd35m", "LoRA, micro-batch 44", 84),
        named("sd35m", "LoRA, micro-batch 44, checkpointing", 20),
        named("flux-dev", "LoRA, micro-batch 8, memory budget 0.5", 70),
        named("flux-dev", "LoRA, micro-batch 8", 96),
    ],
    "offload": [of_plan(case, gib) for case, gib in zip(AWAY, (118, 100), strict=True)],
    "sizes": [
        named("sd35m", "micro-batch 8, 1024 x 1024, 10 steps", 60),
        named("sd35m", "micro-batch 2, 2048 x 2048, 10 steps", 60),
        named("sd35m", "11 groups of 4 images", 84),
        named("sd35m", "44 images, 20 steps", 84),
    ],
    "video": [named("wan2.2", "81 frames, 2 steps without CFG, tiled VAE", 118)],
    "update": [
        step("sd35m, 88 images, micro-batch auto", 100, "sd35m", 88, [f"{ACTOR}.ppo_micro_batch_size_per_gpu=auto"]),
        profile(84, "sd35m", 44),
        profile(61, "wan-1.3b", 8),
        profile(61, "wan-1.3b", 8, "decode"),
    ],
    "signs": [generator("signs", 48, 300.0)],
    "again": [
        named("sd35m", "the same, 88 images", 84),
        named("qwen-image", "LoRA, micro-batch 8, 10 steps", 118),
        named("flux2-klein", "LoRA, micro-batch 4", 30),
        named("sd35-large", "LoRA, micro-batch 4", 36),
        named("wan2.2", "LoRA, micro-batch 1, 33 frames of 480 x 832, checkpointing", 76),
        named("ltx2", "LoRA, micro-batch 4, 49 frames with sound, checkpointing", 95),
    ],
}  # fmt: skip


def on_a_cpu(setting: Setting, size: str) -> Setting:
    """The same with few rows, through a tiny model ("small") or one of few layers."""
    name = f"{setting.name} ({size})"
    if setting.work is make:
        return Setting(name, 1.0, make, (setting.given[0], 10.0, True), setting.seconds)
    work, *middle, overrides = setting.given
    side, images = SMALLER[size]
    less = [*overrides, *ON_A_CPU, *square(side)]
    less += [f"{ROLLOUT}.pipeline.num_frames=5"] if work.startswith(VIDEOS) else []
    if setting.work is fake_ranks.measure:
        given = (work, middle[0], 2, min(middle[2], 4), less)
    else:
        given = (work, *middle[:-1], min(middle[-1], images), less)
    return Setting(name, 1.0, smaller, (setting.work, size, given), setting.seconds)


def smaller(work: Any, size: str, given: tuple, turns: Turns) -> dict[str, Any]:
    with models.in_miniature() if size == "small" else models.in_few_layers():
        return work(*given, turns)


def titles() -> dict[str, list[str]]:
    """Of each group the names of its settings."""
    return {group: [setting.name for setting in settings] for group, settings in GROUPS.items()}


def of_docs(found: dict[str, Any]) -> dict[str, measured.Figures]:
    """What was found at its real size: of tiny models and of few layers nothing is kept."""
    names = {name for group, of_group in titles().items() if group not in UNTOLD for name in of_group}
    return {name: figures for name, figures in found.items() if name in names and "error" not in figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"any of {', '.join(GROUPS)}; all by default, in this order")
    parser.add_argument("--out", type=Path, required=True, help="folder for figures and logs")
    parser.add_argument("--only", nargs="+", help="settings whose names have one of these in them")
    parser.add_argument("--minutes", type=float, default=60.0, help="after these nothing goes on (%(default)s)")
    parser.add_argument("--memory", type=float, default=134.0, help="GiB of the GPU (%(default)s)")
    parser.add_argument("--at-once", type=int, default=4, help="settings at the same time (%(default)s)")
    parser.add_argument("--small", action="store_const", dest="size", const="small", help="tiny models, for a CPU")
    parser.add_argument("--few-layers", action="store_const", dest="size", const="few layers",
                        help="real widths and few layers, for a CPU with 24 GiB, one at a time")  # fmt: skip
    parser.add_argument("--write", type=Path, nargs="+", metavar="DOCUMENT",
                        help="measure nothing: keep the figures of --out for good, and fill tables")  # fmt: skip
    options = parser.parse_args()
    if options.write:
        there = measured.keep(of_docs(json.loads((options.out / "found.json").read_text())))
        for document in options.write:
            document.write_text(scale_tables.filled(document.read_text(), there, titles()))
        return
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    asked = [setting for group in options.groups or GROUPS for setting in GROUPS[group]]
    asked = [s for s in asked if not options.only or any(part in s.name for part in options.only)]
    if not asked:
        parser.error("--only: no setting is called so")
    began = time.monotonic()
    import_everything(count_flops=True)
    settings = [on_a_cpu(s, options.size) for s in asked] if options.size else asked
    found = run_all(settings, options.out, options.memory, options.minutes * 60 - (time.monotonic() - began),
                    options.at_once)  # fmt: skip
    (options.out / "plan.json").write_text(json.dumps(of_docs(found), indent=1))
    if missing := [setting.name for setting in settings if "error" in found[setting.name]]:
        sys.exit(f"error: without figures: {'; '.join(missing)}: see {options.out / 'logs'}, and call again")


if __name__ == "__main__":
    main()
