"""What `verl-omni plan` says beside what was measured on an H200: peak memory and seconds of a step.

    python -m benchmarks.plan_check                                    # on any machine, in a minute or two
    python -m benchmarks.plan_check --only qwen-image
    python -m benchmarks.plan_check --write docs/plan.md               # the table, where it says <!-- PLAN -->
    python -m benchmarks.plan_check --measure --json found.json        # needs an H200: the settings nobody has measured
    python -m benchmarks.plan_check --json found.json --write docs/plan.md     # with these figures, which it keeps

What was measured is in benchmarks/measured.json; with --json the figures of that file join it for good. `python -m
benchmarks.scale --out found` measures many of the settings beside each other, into found/plan.json.

Of one rank of many, it is the peak and the seconds of the update (`python -m benchmarks.fake_ranks`), which computes
and sends nothing: what ranks tell each other is left out on both sides.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import measured
from benchmarks.fake_ranks import rank_settings
from benchmarks.run import WORKS, settings
from benchmarks.sweep import (
    ACTOR,
    CHECKPOINTING,
    EAGER,
    FEW,
    FULL,
    LEAN,
    MEMORY,
    OFFLOAD,
    ROLLOUT,
    UNFOLDED,
    apart,
    at_once,
    measure,
    micro,
    square,
    steps,
)

STAGES = ("gen", "ref", "reward", "old_log_prob", "update_actor")  # of a step, one after the other


@dataclass(frozen=True)
class Case:
    """A setting whose plan is held against what was measured of it (benchmarks/measured.json, by its title)."""

    work: str
    name: str
    images: int  # of one rank of many: how many it has itself
    overrides: list[str] = field(default_factory=list)
    ranks: int | None = None  # of so many one was measured: `benchmarks.fake_ranks`, its update alone
    lora: int = 0  # of one rank

    @property
    def title(self) -> str:
        return f"{self.work}: {self.name}"


def of_sweep(work: str, name: str) -> Case:
    images, overrides = MEMORY[work][name]
    return Case(work, name, images, overrides)


def groups(size: int, images: int) -> list[str]:
    """So many images of a prompt."""
    prompts = images // size
    return [f"{ROLLOUT}.n={size}", f"data.train_batch_size={prompts}", f"{ACTOR}.ppo_mini_batch_size={prompts}"]


LARGEST = "full, micro-batch 1, checkpointing, optimizer offload"
STATE_AWAY = [*FEW, *FULL, *micro(1), *CHECKPOINTING, OFFLOAD[1], LEAN[-1], f"{ROLLOUT}.max_num_seqs=2"]
BLOCKS = [f"{ROLLOUT}.gather=blocks"]
FOLDED = [f"{ACTOR}.engine.fold_lora=true", f"{ACTOR}.engine.compile_ahead=true"]
LONG = [
    f"{ROLLOUT}.pipeline.num_frames=81", *steps(2), f"{ROLLOUT}.algo.sde_window_size=1",
    f"{ROLLOUT}.pipeline.guidance_scale=1", f"{ROLLOUT}.vae_tiling=true",
]  # fmt: skip
FP8 = [f"{ROLLOUT}.precision=fp8"]
REFERENCE_FP8 = "actor_rollout_ref.ref.precision=fp8"
HALF, BUDGET = "memory budget 0.5", [f"{ACTOR}.engine.activation_memory_budget=0.5"]
CORRECTED = "algorithm.rollout_correction.rollout_is=step"
CASES = [
    Case("sd35m", "LoRA, micro-batch 44, 10 steps", 176),
    Case("sd35m", "the same, 44 images", 44),
    Case("sd35m", "the same, 88 images", 88),
    Case("sd35m", "not compiled", 44, [EAGER[0]]),
    Case("sd35m", "micro-batch 2", 44, micro(2)),
    of_sweep("sd35m", "LoRA, micro-batch 44"),
    of_sweep("sd35m", "LoRA, micro-batch 16"),
    of_sweep("sd35m", "LoRA, micro-batch 44, checkpointing"),
    of_sweep("sd35m", "full, micro-batch 16"),
    Case("qwen-image", "LoRA, micro-batch 8, 10 steps", 32),
    of_sweep("qwen-image", "LoRA, micro-batch 8, folded"),
    of_sweep("qwen-image", "LoRA, micro-batch 8"),
    of_sweep("qwen-image", "LoRA, micro-batch 4, encoder offload"),
    of_sweep("qwen-image", "LoRA, micro-batch 16, checkpointing, encoder offload"),
    of_sweep("qwen-image", "LoRA, micro-batch 16, checkpointing, all offload"),
    Case("flux-dev", "LoRA, micro-batch 4", 16),
    Case("flux2-klein", "LoRA, micro-batch 4", 16),
    Case("z-image", "LoRA, micro-batch 4", 16),
    Case("wan-1.3b", "LoRA, micro-batch 4, 17 frames", 16),
    Case("sd35-large", "LoRA, micro-batch 4", 16),
    Case("wan2.2", "LoRA, micro-batch 1, 33 frames of 480 x 832, checkpointing", 2),
    Case("ltx2", "LoRA, micro-batch 4, 49 frames with sound, checkpointing", 4),
    Case("wan-ti2v-5b", "LoRA, micro-batch 4, 49 frames", 4),
    Case("glm-image", "LoRA, micro-batch 4", 16),
    Case("flux2-dev", "LoRA, micro-batch 4, checkpointing", 8),
    Case("qwen-image-edit", "LoRA, micro-batch 2, checkpointing", 4),
    # In 8 bits.
    Case("sd35m", "88 images, rollout and reference in 8 bits", 88, [*FP8, REFERENCE_FP8]),
    Case("z-image", "in 8 bits", 16, FP8),
    Case("z-image", "in 8 bits, corrected", 16, [*FP8, CORRECTED]),
    Case("flux-dev", "in 8 bits", 16, FP8),
    Case("wan-1.3b", "in 8 bits", 16, FP8),
    # One rank of many.
    Case("qwen-image", "full, rank 0 of 8", 4, ranks=8),
    Case("qwen-image", "full, rank 0 of 8, by blocks", 8, BLOCKS, ranks=8),
    Case("qwen-image", "full, rank 0 of 16, by blocks", 8, BLOCKS, ranks=16),
    Case("qwen-image", "full, rank 0 of 64, by blocks", 8, BLOCKS, ranks=64),
    Case("qwen-image", "LoRA, rank 0 of 8", 8, ranks=8, lora=64),
    Case("flux-dev", "LoRA, folded, rank 0 of 1", 8, FOLDED, ranks=1, lora=32),
    Case("flux-dev", "LoRA, folded, rank 0 of 8", 8, FOLDED, ranks=8, lora=32),
    Case("flux-dev", "LoRA, folded, rank 0 of 8 in two copies", 8, [*FOLDED, f"{ACTOR}.fsdp_config.fsdp_size=4"],
         ranks=8, lora=32),
    # Other sizes, groups and steps.
    of_sweep("sd35m", "full, micro-batch 16, checkpointing, offload"),
    Case("sd35m", "11 groups of 4 images", 44, groups(4, 44)),
    Case("sd35m", "44 images, 20 steps", 44, steps(20)),
    Case("sd35m", "micro-batch 8, 1024 x 1024, 10 steps", 16, [*square(1024), *at_once(8)]),
    Case("sd35m", "micro-batch 2, 2048 x 2048, 10 steps", 4, [*square(2048), *at_once(2)]),
    Case("wan2.2", "81 frames, 2 steps without CFG, tiled VAE", 2, LONG),
    Case("flux-dev", "LoRA, micro-batch 8, checkpointing", 16, [*FEW, *micro(8), *CHECKPOINTING]),
    Case("flux2-klein", "full, micro-batch 4, checkpointing", 16, [*FEW, *FULL, *micro(4), *CHECKPOINTING]),
    Case("z-image", "LoRA, micro-batch 8", 16, [*FEW, *micro(8)]),
    Case("wan-1.3b", "full, micro-batch 2, checkpointing", 8, [*FEW, *FULL, *micro(2), *CHECKPOINTING]),
    # A part of the activations computed again, beside all of them (checkpointing) and none.
    Case("qwen-image", f"LoRA, micro-batch 8, {HALF}", 16, [*FEW, *micro(8), *BUDGET]),
    Case("qwen-image", "LoRA, micro-batch 8, checkpointing", 16, [*FEW, *micro(8), *CHECKPOINTING]),
    Case("sd35m", f"LoRA, micro-batch 44, {HALF}", 44, [*FEW, *micro(44), *BUDGET]),
    Case("flux-dev", f"LoRA, micro-batch 8, {HALF}", 16, [*FEW, *micro(8), *BUDGET]),
    Case("flux-dev", "LoRA, micro-batch 8", 16, [*FEW, *micro(8)]),
    Case("sd35m", "LoRA, micro-batch 8, 1024 x 1024", 8, [*FEW, *micro(8), *square(1024)]),
    Case("sd35m", "full, micro-batch 8, not compiled", 8, [*FEW, *FULL, *micro(8), EAGER[0]]),
    Case("qwen-image", "LoRA, micro-batch 4, 1024 x 1024, checkpointing", 8,
         [*FEW, *micro(4), *CHECKPOINTING, *square(1024), *UNFOLDED]),
    Case("z-image", "full, micro-batch 4, checkpointing, offload", 16,
         [*FEW, *FULL, *micro(4), *CHECKPOINTING, *OFFLOAD, LEAN[-1]]),
    # the largest whose weights are all trained on one H200: the optimizer's state is on the host
    Case("flux-dev", LARGEST, 4, STATE_AWAY),
    Case("qwen-image", f"{LARGEST}, held in bfloat16", 4, [*STATE_AWAY, f"{ACTOR}.engine.model_dtype=bfloat16"]),
]  # fmt: skip


def planned(case: Case, folder: Path, known: dict) -> tuple[float, float]:
    """(peak in GiB, seconds of a step), as the command would say."""
    from hydra import compose, initialize_config_module

    from verl_omni.config import schema
    from verl_omni.config.keys import with_plus
    from verl_omni.trainer.forecast.forecast import forecast
    from verl_omni.trainer.forecast.seconds import StepTime

    schema.register()
    folder.mkdir(exist_ok=True)
    given = settings(WORKS[case.work], case.images, folder)
    if case.ranks:
        given = rank_settings(case.work, case.ranks, case.images, case.lora, folder)
    given = [*given, *case.overrides]
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        config = compose("diffusion_trainer", list(map(with_plus, given)))
    found = forecast(config, gpus=case.ranks or 1, gpu="h200", known=known)
    way, ways = found.asked, found.ways
    if case.ranks:
        alone = StepTime(ways.costs(ways.settings), ways.settings, ways.amounts, ways.card.rates, sends=False)
        peak = next(stage.peak for stage in way.stages if stage.name == "update")
        return peak / 2**30, alone.learning(found.layout).update
    return way.peak / 2**30, way.seconds


def compared(case: Case, figures: measured.Figures) -> tuple[float | None, float | None]:
    """(peak in GiB, seconds) of what was measured, as `planned` reckons them: of a step, or of a rank's update."""
    if case.ranks:
        return figures.get("update GiB"), figures.get("update s")
    return figures.get("peak GiB"), figures.get("stages s", figures.get("step s"))


def rows(cases: list[Case], there: dict[str, measured.Figures], folder: Path) -> Iterator[str]:
    yield "| model | setting | peak measured, GiB | planned | off by | step measured, s | planned | off by |"
    yield "|---|---|---|---|---|---|---|---|"
    known: dict = {}  # costs of models, which many cases share
    for case in cases:
        pairs = []
        said = planned(case, folder / case.work, known)
        for real, plan, digits in zip(compared(case, there.get(case.title, {})), said, (1, 2), strict=True):
            off = f"{plan / real - 1:+.0%}" if real else ""
            pairs.append(f"{f'{real:.{digits}f}' if real else ''} | {plan:.{digits}f} | {off}")
        yield f"| {case.work} | {case.name} | {' | '.join(pairs)} |"


def measure_here(cases: list[Case], to: Path | None) -> None:
    """Peak and seconds of the second step of each, one after the other, in processes of their own."""
    from benchmarks.sweep import import_everything

    import_everything()
    from torch import OutOfMemoryError

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            try:
                timed = apart(measure, case.work, case.images, case.overrides, Path(folder) / "moments.pt")
            except OutOfMemoryError as error:
                print(f"{case.title}: {error}", flush=True)
                continue
            step = sum(timed.get(stage, 0.0) for stage in STAGES)
            found[case.title] = {"peak GiB": timed["allocated"], "stages s": step}
            print(f"{case.title}: {timed['allocated']:.1f} GiB, {step:.2f} s", flush=True)
            if to:
                to.write_text(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="cases whose model or setting has one of these in it")
    parser.add_argument("--measure", action="store_true", help="measure those that nobody has, here, on a GPU")
    parser.add_argument("--json", type=Path, help="figures: written by --measure, without it read, and kept for good")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="fill its <!-- PLAN -->")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.only or any(part in case.title for part in options.only)]
    if not cases:
        parser.error("--only: no case is called so")
    if options.measure:
        there = measured.read()
        measure_here([case for case in cases if case.title not in there and not case.ranks], options.json)
        return
    there = measured.keep(json.loads(options.json.read_text())) if options.json else measured.read()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for line in rows(cases, there, Path(folder)):
            print(line, flush=True)
            lines.append(line)
    if options.write:
        from verl_omni.report.document_tables import fill

        options.write.write_text(fill(options.write.read_text(), "PLAN", "\n".join(lines)))


if __name__ == "__main__":
    sys.exit(main())
