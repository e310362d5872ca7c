"""What training that grows needs at real size, measured on one H200 in few minutes, the most telling first.

    python -m benchmarks.scale --out found                       # needs an H200: all of it
    python -m benchmarks.scale ranks offload --out found --minutes 4
    python -m benchmarks.scale --small --out found               # tiny models through the same code, on a CPU

ranks: one rank of many (benchmarks.fake_ranks), and one rank of one beside it. offload: all weights of the largest
model whose optimizer fits into the host. veomni: its update beside FSDP2's. models: architectures at their size.
video: a long one. fp8: rollouts in 8 bits, and the same without. sizes: large images. plan: settings for
the table of docs/plan.md (benchmarks.plan_check --json found/plan.json).

Settings compile beside each other and are timed alone (benchmarks.side_by_side). Figures are in found/found.json after
each, what each printed in found/logs.
"""

import argparse
import json
import time
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
SMALL = [
    f"{ROLLOUT}.pipeline.height=32", f"{ROLLOUT}.pipeline.width=32", f"{ROLLOUT}.pipeline.num_inference_steps=4",
    f"{ACTOR}.engine.use_torch_compile=false", f"{ACTOR}.engine.compile_ahead=false", f"{ACTOR}.engine.dtype=bfloat16",
]  # fmt: skip
VIDEOS = ("wan", "ltx2")


def rank(name: str, gib: float, work: str, ranks: int, lora: int, overrides: list[str]) -> Setting:
    return Setting(name, gib, fake_ranks.measure, (work, ranks, 4, lora, overrides))


def step(name: str, gib: float, work: str, images: int, overrides: list[str]) -> Setting:
    return Setting(name, gib, metrics, (work, images, overrides))


def metrics(work: str, images: int, overrides: list[str], turns: Turns) -> dict[str, Any]:
    """Of the second step of a run without Ray."""
    found = two_steps(work, images, overrides, turns)[1]
    shown = ("timing_s/", "perf/", "first step", "build", "actor/first_ratio_max_dev")
    kept = {name: value for name, value in found.items() if name.startswith(shown)}
    return kept | {"images/s": images / found["timing_s/step"], "peak GiB": found.get("perf/max_memory_allocated_gb"),
                   "step s": found["timing_s/step"]}  # fmt: skip


def of_plan(case: Any, gib: float) -> Setting:
    return Setting(f"plan: {case.work}: {case.name}", gib, peak_and_seconds, (case.work, case.images, case.overrides))


def peak_and_seconds(work: str, images: int, overrides: list[str], turns: Turns) -> dict[str, float]:
    timed = measure(work, images, overrides, None, turns)
    seconds = sum(timed.get(stage, 0.0) for stage in ("gen", "ref", "reward", "update_actor"))
    return {"peak GiB": timed["allocated"], "step s": seconds}


AWAY = [case for case in CASES if LARGEST in case.name]
# The memory is what `plan` says and a sixth and some GiB more, for gaps between tensors: what needs more ends.
GROUPS: dict[str, list[Setting]] = {
    "ranks": [
        rank("Qwen-Image, full, rank 0 of 8, by blocks", 60, "qwen-image", 8, 0, BLOCKS),
        rank("Qwen-Image, full, rank 0 of 16, by blocks", 36, "qwen-image", 16, 0, BLOCKS),
        rank("Qwen-Image, full, rank 0 of 64, by blocks", 24, "qwen-image", 64, 0, BLOCKS),
        rank("FLUX.1-dev, LoRA, folded, rank 0 of 1", 68, "flux-dev", 1, 32, FOLDED),
        rank("FLUX.1-dev, LoRA, folded, rank 0 of 8", 40, "flux-dev", 8, 32, FOLDED),
        rank("FLUX.1-dev, LoRA, folded, rank 0 of 8 in two copies", 40, "flux-dev", 8, 32,
             [*FOLDED, f"{ACTOR}.fsdp_config.fsdp_size=4"]),
    ],
    "offload": [of_plan(case, gib) for case, gib in zip(AWAY, (118, 100), strict=True)],
    "veomni": [
        rank("Qwen-Image, full, rank 0 of 8, VeOmni", 94, "qwen-image", 8, 0, VEOMNI),
        rank("Qwen-Image, LoRA, rank 0 of 8, FSDP2", 62, "qwen-image", 8, 64, []),
        rank("Qwen-Image, LoRA, rank 0 of 8, VeOmni", 62, "qwen-image", 8, 64, VEOMNI),
    ],
    "video": [
        step("wan2.2, 81 frames", 118, "wan2.2", 2,
             [f"{ROLLOUT}.pipeline.num_frames=81", f"{ROLLOUT}.pipeline.num_inference_steps=2",
              f"{ROLLOUT}.algo.sde_window_size=1", f"{ROLLOUT}.pipeline.guidance_scale=1",
              f"{ROLLOUT}.vae_tiling=true"]),
    ],
    "models": [
        step("wan-ti2v-5b", 88, "wan-ti2v-5b", 4, []),
        step("glm-image", 50, "glm-image", 16, []),
        step("flux2-dev", 86, "flux2-dev", 16, []),
        step("qwen-image-edit", 84, "qwen-image-edit", 4, []),
        step("sd35-large", 40, "sd35-large", 16, []),
        step("wan2.2", 88, "wan2.2", 2, []),
    ],
    "fp8": [
        step("sd35m, 176 images, rollout and reference in 8 bits", 84, "sd35m", 176, [*FP8, REFERENCE_FP8]),
        step("flux-dev", 68, "flux-dev", 16, []),
        step("flux-dev, fp8", 68, "flux-dev", 16, FP8),
        step("z-image", 45, "z-image", 16, []),
        step("z-image, fp8", 45, "z-image", 16, FP8),
        step("wan-1.3b", 66, "wan-1.3b", 16, []),
        step("wan-1.3b, fp8", 66, "wan-1.3b", 16, FP8),
    ],
    "sizes": [
        step("sd35m, 1024 x 1024", 60, "sd35m", 16, [*square(1024), *at_once(8)]),
        step("sd35m, 2048 x 2048", 60, "sd35m", 4, [*square(2048), *at_once(2)]),
    ],
    "plan": [
        of_plan(case, gib)
        for case, gib in zip((c for c in CASES if c.peak is None and c.ranks == 1 and c not in AWAY),
                             (34, 48, 78, 68, 50, 62, 95, 86, 72), strict=True)
    ],
}  # fmt: skip


def in_miniature(setting: Setting) -> Setting:
    """The same through a tiny model, with few rows."""
    work, *middle, overrides = setting.given
    video = [f"{ROLLOUT}.pipeline.num_frames=5"] if work.startswith(VIDEOS) else []
    if setting.work is fake_ranks.measure:
        given = (work, middle[0], 2, min(middle[2], 4), [*overrides, *SMALL, *video])
    else:
        given = (work, 4 if middle[0] > 4 else middle[0], [*overrides, *SMALL, *video])
    return Setting(setting.name, 1.0, small, (setting.work, given), setting.seconds)


def small(work: Any, given: tuple, turns: Turns) -> dict[str, Any]:
    with models.in_miniature():
        return work(*given, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"any of {', '.join(GROUPS)}; all by default, in this order")
    parser.add_argument("--out", type=Path, required=True, help="folder for figures and logs")
    parser.add_argument("--only", nargs="+", help="settings whose names have one of these in them")
    parser.add_argument("--minutes", type=float, default=60.0, help="after these nothing goes on (%(default)s)")
    parser.add_argument("--memory", type=float, default=130.0, help="GiB of the GPU (%(default)s)")
    parser.add_argument("--at-once", type=int, default=4, help="settings at the same time (%(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny models, for a CPU")
    options = parser.parse_args()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    named = [setting for group in options.groups or GROUPS for setting in GROUPS[group]]
    named = [s for s in named if not options.only or any(part in s.name for part in options.only)]
    if not named:
        parser.error("--only: no setting is called so")
    began = time.monotonic()
    import_everything(count_flops=True)
    settings = [in_miniature(s) for s in named] if options.small else named
    found = run_all(settings, options.out, options.memory, options.minutes * 60 - (time.monotonic() - began),
                    options.at_once)  # fmt: skip
    planned = {name.removeprefix("plan: "): [figures["peak GiB"], figures["step s"]]
               for name, figures in found.items() if name.startswith("plan: ") and "error" not in figures}  # fmt: skip
    (options.out / "plan.json").write_text(json.dumps(planned, indent=1))


if __name__ == "__main__":
    main()
