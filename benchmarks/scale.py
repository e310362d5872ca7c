"""What training needs at real size, measured on one H200 in few minutes, the most telling first.

    python -m benchmarks.scale --out found                       # needs an H200: all of it
    python -m benchmarks.scale ranks offload --out found --minutes 4
    python -m benchmarks.scale --few-layers --out found          # real widths, few layers, on a CPU: does it all fit?
    python -m benchmarks.scale --small --out found               # tiny models through the same code, on a CPU

words: the generator of that task, which is made while the others compile. models: architectures at their size. fp8:
rollouts in 8 bits, and the same without. ranks: one rank of many (benchmarks.fake_ranks), and one rank of one beside
it. veomni: its update beside FSDP2's. plan: settings for the table of docs/plan.md (benchmarks.plan_check --json
found/plan.json). offload: all weights of the largest model whose optimizer fits into the host. sizes: large images.
video: a long one. update: a micro-batch that the run finds, and profiles. again: what docs/performance.md has already.

Settings compile beside each other and are timed alone (benchmarks.side_by_side). Figures are in found/found.json after
each, what each printed in found/logs. The same command again measures what is missing there. It ends with an error
where a setting has no figures.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import fake_ranks, models
from benchmarks.plan_check import CASES, LARGEST
from benchmarks.side_by_side import Setting, Turns, run_all
from benchmarks.sweep import at_once, import_everything, measure, square, two_steps

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BLOCKS = [f"{ROLLOUT}.gather=blocks"]
FOLDED = [f"{ACTOR}.engine.fold_lora=true", f"{ACTOR}.engine.compile_ahead=true"]
VEOMNI = [f"{ACTOR}.strategy=veomni"]
FP8 = [f"{ROLLOUT}.precision=fp8"]
REFERENCE_FP8 = "actor_rollout_ref.ref.precision=fp8"
ON_A_CPU = [
    f"{ROLLOUT}.pipeline.num_inference_steps=3", f"{ACTOR}.engine.use_torch_compile=false",
    f"{ACTOR}.engine.compile_ahead=false", f"{ACTOR}.engine.dtype=bfloat16",
]  # fmt: skip
VIDEOS = ("wan", "ltx2")
SMALLER = {"small": (32, 4), "few layers": (64, 2)}  # pixels, which the real VAEs divide, and images


def rank(name: str, gib: float, work: str, ranks: int, lora: int, overrides: list[str]) -> Setting:
    return Setting(name, gib, fake_ranks.measure, (work, ranks, 4, lora, overrides))


def step(name: str, gib: float, work: str, images: int, overrides: list[str]) -> Setting:
    return Setting(name, gib, metrics, (work, images, overrides))


def metrics(work: str, images: int, overrides: list[str], turns: Turns) -> dict[str, Any]:
    """Of the second step of a run without Ray."""
    found = two_steps(work, images, overrides, turns)[1]
    shown = ("timing_s/", "perf/", "first step", "build", "actor/first_ratio_max_dev", "actor/rollout_ratio")
    kept = {name: value for name, value in found.items() if name.startswith(shown)}
    return kept | {"images/s": images / found["timing_s/step"], "peak GiB": found.get("perf/max_memory_allocated_gb"),
                   "step s": found["timing_s/step"]}  # fmt: skip


def of_plan(case: Any, gib: float) -> Setting:
    return Setting(f"plan: {case.work}: {case.name}", gib, peak_and_seconds, (case.work, case.images, case.overrides))


def peak_and_seconds(work: str, images: int, overrides: list[str], turns: Turns) -> dict[str, float]:
    timed = measure(work, images, overrides, None, turns)
    seconds = sum(timed.get(stage, 0.0) for stage in ("gen", "ref", "reward", "update_actor"))
    return {"peak GiB": timed["allocated"], "step s": seconds}


def profile(gib: float, work: str, images: int) -> Setting:
    return Setting(f"profile of an update: {work}", gib, profiled, (work, images, []))


def profiled(work: str, images: int, overrides: list[str], turns: Turns) -> dict[str, float]:
    """Seconds of the stages; the profile is in the log, and a trace beside the figures."""
    from benchmarks import profile_update

    out = turns.folder / "profiles" / work
    out.mkdir(parents=True, exist_ok=True)
    return profile_update.profiled(work, images, out, overrides, turns)


def generator(task: str, seconds: float) -> Setting:
    return Setting(f"the generator of {task}", 12, make, (task, seconds, False), 2 * seconds + 200)


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
OPEN = [case for case in CASES if case.peak is None and case.ranks == 1 and case not in AWAY]
# The memory is what `plan` says and a tenth and some GiB more, for gaps between tensors: what needs more ends.
GROUPS: dict[str, list[Setting]] = {
    "words": [generator("words", 240.0)],
    "models": [
        step("wan-ti2v-5b", 80, "wan-ti2v-5b", 4, []),
        step("glm-image", 32, "glm-image", 16, []),
        step("flux2-dev", 78, "flux2-dev", 8, []),
        step("qwen-image-edit", 81, "qwen-image-edit", 4, []),
    ],
    "fp8": [
        step("sd35m, 88 images, rollout and reference in 8 bits", 84, "sd35m", 88, [*FP8, REFERENCE_FP8]),
        step("z-image, fp8", 40, "z-image", 16, FP8),
        step("flux-dev, fp8", 62, "flux-dev", 16, FP8),
        step("z-image", 40, "z-image", 16, []),
        step("flux-dev", 62, "flux-dev", 16, []),
        step("wan-1.3b, fp8", 61, "wan-1.3b", 16, FP8),
        step("wan-1.3b", 61, "wan-1.3b", 16, []),
    ],
    "ranks": [
        rank("Qwen-Image, full, rank 0 of 16, by blocks", 36, "qwen-image", 16, 0, BLOCKS),
        rank("Qwen-Image, full, rank 0 of 64, by blocks", 24, "qwen-image", 64, 0, BLOCKS),
        rank("FLUX.1-dev, LoRA, folded, rank 0 of 8", 40, "flux-dev", 8, 32, FOLDED),
        rank("FLUX.1-dev, LoRA, folded, rank 0 of 1", 68, "flux-dev", 1, 32, FOLDED),
        rank("FLUX.1-dev, LoRA, folded, rank 0 of 8 in two copies", 40, "flux-dev", 8, 32,
             [*FOLDED, f"{ACTOR}.fsdp_config.fsdp_size=4"]),
        rank("Qwen-Image, full, rank 0 of 8, by blocks", 60, "qwen-image", 8, 0, BLOCKS),
    ],
    "veomni": [
        rank("Qwen-Image, LoRA, rank 0 of 8, FSDP2", 62, "qwen-image", 8, 64, []),
        rank("Qwen-Image, LoRA, rank 0 of 8, VeOmni", 62, "qwen-image", 8, 64, VEOMNI),
        rank("Qwen-Image, full, rank 0 of 8, VeOmni", 94, "qwen-image", 8, 0, VEOMNI),
    ],
    "plan": [of_plan(case, gib) for case, gib in zip(OPEN, (34, 48, 78, 68, 50, 62, 95, 86, 72), strict=True)],
    "offload": [of_plan(case, gib) for case, gib in zip(AWAY, (118, 100), strict=True)],
    "sizes": [
        step("sd35m, 1024 x 1024", 60, "sd35m", 16, [*square(1024), *at_once(8)]),
        step("sd35m, 2048 x 2048", 60, "sd35m", 4, [*square(2048), *at_once(2)]),
    ],
    "video": [
        step("wan2.2, 81 frames", 118, "wan2.2", 2,
             [f"{ROLLOUT}.pipeline.num_frames=81", f"{ROLLOUT}.pipeline.num_inference_steps=2",
              f"{ROLLOUT}.algo.sde_window_size=1", f"{ROLLOUT}.pipeline.guidance_scale=1",
              f"{ROLLOUT}.vae_tiling=true"]),
    ],
    "update": [
        step("sd35m, 88 images, micro-batch auto", 100, "sd35m", 88, [f"{ACTOR}.ppo_micro_batch_size_per_gpu=auto"]),
        profile(84, "sd35m", 44),
        profile(61, "wan-1.3b", 8),
    ],
    "again": [
        step("sd35m, 88 images", 84, "sd35m", 88, []),
        step("qwen-image", 118, "qwen-image", 32, []),
        step("sd35-large", 36, "sd35-large", 16, []),
        step("wan2.2", 76, "wan2.2", 2, []),
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
        given = (work, min(middle[0], images), less)
    return Setting(name, 1.0, smaller, (setting.work, size, given), setting.seconds)


def smaller(work: Any, size: str, given: tuple, turns: Turns) -> dict[str, Any]:
    with models.in_miniature() if size == "small" else models.in_few_layers():
        return work(*given, turns)


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
    options = parser.parse_args()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    named = [setting for group in options.groups or GROUPS for setting in GROUPS[group]]
    named = [s for s in named if not options.only or any(part in s.name for part in options.only)]
    if not named:
        parser.error("--only: no setting is called so")
    began = time.monotonic()
    import_everything(count_flops=True)
    settings = [on_a_cpu(s, options.size) for s in named] if options.size else named
    found = run_all(settings, options.out, options.memory, options.minutes * 60 - (time.monotonic() - began),
                    options.at_once)  # fmt: skip
    planned = {name.removeprefix("plan: "): [figures["peak GiB"], figures["step s"]]
               for name, figures in found.items() if name.startswith("plan: ") and "error" not in figures}  # fmt: skip
    (options.out / "plan.json").write_text(json.dumps(planned, indent=1))
    if missing := [setting.name for setting in settings if "error" in found[setting.name]]:
        sys.exit(f"error: without figures: {'; '.join(missing)}: see {options.out / 'logs'}, and call again")


if __name__ == "__main__":
    main()
