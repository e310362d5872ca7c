"""What `verl-omni plan` says beside what was measured on an H200: peak memory and seconds of a step.

    python -m benchmarks.plan_check                                    # on any machine, in a minute or two
    python -m benchmarks.plan_check --only qwen-image
    python -m benchmarks.plan_check --write docs/plan.md               # the table, where it says <!-- PLAN -->
    python -m benchmarks.plan_check --measure --json found.json        # needs an H200: the settings nobody has measured

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
    measure,
    micro,
    square,
)

ALLOWED = 0.10  # of what was measured


@dataclass(frozen=True)
class Case:
    """A setting: the peak in GiB and the seconds of a step that were measured (docs/performance.md)."""

    work: str
    name: str
    images: int
    overrides: list[str] = field(default_factory=list)
    peak: float | None = None
    step: float | None = None
    ranks: int = 1  # of which one was measured: `benchmarks.fake_ranks`, its update alone
    lora: int = 0


def of_sweep(work: str, name: str, peak: float | None = None, step: float | None = None) -> Case:
    images, overrides = MEMORY[work][name]
    return Case(work, name, images, overrides, peak, step)


LARGEST = "full, micro-batch 1, checkpointing, optimizer offload"
STATE_AWAY = [*FEW, *FULL, *micro(1), *CHECKPOINTING, OFFLOAD[1], LEAN[-1], f"{ROLLOUT}.max_num_seqs=2"]
CASES = [
    Case("sd35m", "LoRA, micro-batch 44, 10 steps", 176, [], 72.6, 49.94),
    Case("sd35m", "the same, 44 images", 44, [], 70.3, 12.30),
    Case("sd35m", "not compiled", 44, [EAGER[0]], 105.4, 27.63),
    Case("sd35m", "micro-batch 2", 44, micro(2), 10.4, 35.26),
    of_sweep("sd35m", "LoRA, micro-batch 44", 69.2),
    of_sweep("sd35m", "LoRA, micro-batch 16", 28.8),
    of_sweep("sd35m", "LoRA, micro-batch 44, checkpointing", 12.0),
    of_sweep("sd35m", "full, micro-batch 16", 80.7),
    Case("qwen-image", "LoRA, micro-batch 8, 10 steps", 32, [], 106.8, 25.43),
    of_sweep("qwen-image", "LoRA, micro-batch 8, folded", 106.7, 8.37),
    of_sweep("qwen-image", "LoRA, micro-batch 8", 106.7, 8.56),
    of_sweep("qwen-image", "LoRA, micro-batch 4, encoder offload", 76.1, 9.40),
    of_sweep("qwen-image", "LoRA, micro-batch 16, checkpointing, encoder offload", 57.5, 9.25),
    of_sweep("qwen-image", "LoRA, micro-batch 16, checkpointing, all offload", 54.4),
    Case("flux-dev", "LoRA, micro-batch 4", 16, [], 53.4, 10.14),
    Case("flux2-klein", "LoRA, micro-batch 4", 16, [], 22.6, 7.35),
    Case("z-image", "LoRA, micro-batch 4", 16, [], 34.0, 9.20),
    Case("wan-1.3b", "LoRA, micro-batch 4, 17 frames", 16, [], 53.0, 19.08),
    Case("sd35-large", "LoRA, micro-batch 4", 16, [], 30.2, 6.58),
    Case("wan2.2", "LoRA, micro-batch 1, 33 frames of 480 x 832, checkpointing", 2, [], 66.1, 52.02),
    # One rank of many (benchmarks.fake_ranks): `images` is how many it has itself.
    Case("qwen-image", "full, rank 0 of 8", 4, [], 41.7, 0.88, ranks=8),
    Case("qwen-image", "full, rank 0 of 16", 4, ranks=16),
    Case("qwen-image", "full, rank 0 of 64", 4, ranks=64),
    Case("qwen-image", "LoRA, rank 0 of 8", 4, ranks=8, lora=64),
    # to be measured
    of_sweep("sd35m", "full, micro-batch 16, checkpointing, offload"),
    Case("flux-dev", "LoRA, micro-batch 8, checkpointing", 16, [*FEW, *micro(8), *CHECKPOINTING]),
    Case("flux2-klein", "full, micro-batch 4, checkpointing", 16, [*FEW, *FULL, *micro(4), *CHECKPOINTING]),
    Case("z-image", "LoRA, micro-batch 8", 16, [*FEW, *micro(8)]),
    Case("wan-1.3b", "full, micro-batch 2, checkpointing", 8, [*FEW, *FULL, *micro(2), *CHECKPOINTING]),
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
    if case.ranks > 1:
        given = rank_settings(case.work, case.ranks, case.images, case.lora, folder)
    given = [*given, *case.overrides]
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        config = compose("diffusion_trainer", list(map(with_plus, given)))
    found = forecast(config, gpus=case.ranks, gpu="h200", known=known)
    way, ways = found.asked, found.ways
    if case.ranks > 1:
        alone = StepTime(ways.costs(ways.settings), ways.settings, ways.amounts, ways.card.rates, sends=False)
        peak = next(stage.peak for stage in way.stages if stage.name == "update")
        return peak / 2**30, alone.learning(found.layout).update
    return way.peak / 2**30, way.seconds


def rows(cases: list[Case], found: dict[str, list[float]], folder: Path) -> Iterator[str]:
    yield "| model | setting | peak measured, GiB | planned | off by | step measured, s | planned | off by |"
    yield "|---|---|---|---|---|---|---|---|"
    known: dict = {}  # costs of models, which many cases share
    for case in cases:
        peak, step = planned(case, folder / case.work, known)
        measured = found.get(f"{case.work}: {case.name}", [case.peak, case.step])
        pairs = []
        for real, said, digits in zip(measured, (peak, step), (1, 2), strict=True):
            off = f"{said / real - 1:+.0%}" if real else ""
            pairs.append(f"{f'{real:.{digits}f}' if real else ''} | {said:.{digits}f} | {off}")
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
                print(f"{case.work}: {case.name}: {error}", flush=True)
                continue
            step = sum(timed.get(stage, 0.0) for stage in ("gen", "ref", "reward", "update_actor"))
            found[f"{case.work}: {case.name}"] = [timed["allocated"], step]
            print(f"{case.work}: {case.name}: {timed['allocated']:.1f} GiB, {step:.2f} s", flush=True)
            if to:
                to.write_text(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="cases whose model or setting has one of these in it")
    parser.add_argument("--measure", action="store_true", help="measure those that nobody has, here, on a GPU")
    parser.add_argument("--json", type=Path, help="figures of --measure: written, or without it read")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="fill its <!-- PLAN -->")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.only or any(o in f"{case.work}: {case.name}" for o in options.only)]
    if not cases:
        parser.error("--only: no case is called so")
    if options.measure:
        measure_here([case for case in cases if case.peak is None and case.ranks == 1], options.json)
        return
    found = json.loads(options.json.read_text()) if options.json else {}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for line in rows(cases, found, Path(folder)):
            print(line, flush=True)
            lines.append(line)
    if options.write:
        from verl_omni.report.document_tables import fill

        options.write.write_text(fill(options.write.read_text(), "PLAN", "\n".join(lines)))


if __name__ == "__main__":
    sys.exit(main())
