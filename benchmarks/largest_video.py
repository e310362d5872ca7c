"""The longest videos that train on 1, 2, 4 and 8 GPUs that share each sample's tokens, by `verl-omni plan`.

    python -m benchmarks.largest_video                              # on any machine, in some minutes
    python -m benchmarks.largest_video --write docs/plan.md         # the table, where it says <!-- VIDEOS -->

LoRA of rank 32, gradient checkpointing, one video in a forward and in a backward, on H200s.
Memory grows with the number of tokens: what each stage needs is taken from videos of two lengths.
"""

import argparse
import math
import tempfile
from pathlib import Path

from benchmarks.run import WORKS, settings
from benchmarks.sweep import CHECKPOINTING, micro

ROLLOUT = "actor_rollout_ref.rollout"
LENGTHS = (17, 33)  # frames
GROUP = 4  # frames of one step in time of Wan's latents
SIZES = {"480 x 832": (480, 832), "720 x 1280": (720, 1280)}
# name, attention heads: as many GPUs share a sample as divide them
MODELS = {"wan-1.3b": ("Wan2.1 1.3B", 12), "wan2.2": ("Wan2.2 14B, both transformers", 40)}
RANKS = (1, 2, 4, 8)
ULYSSES = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"


def given(work: str, size: tuple[int, int], frames: int, ranks: int, folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    return [
        *settings(WORKS[work], 8, folder), *CHECKPOINTING, *micro(1), f"{ROLLOUT}.pipeline.height={size[0]}",
        f"{ROLLOUT}.pipeline.width={size[1]}", f"{ROLLOUT}.pipeline.num_frames={frames}", f"{ROLLOUT}.max_num_seqs=1",
        f"{ROLLOUT}.encoder_offload=true", f"trainer.n_gpus_per_node={ranks}",
        "actor_rollout_ref.actor.engine.fold_lora=false", f"{ULYSSES}={math.gcd(ranks, MODELS[work][1])}",
    ]  # fmt: skip


def peaks(work: str, size: tuple[int, int], frames: int, folder: Path, known: dict) -> dict[int, dict[str, float]]:
    """Of each stage, for each number of ranks."""
    from hydra import compose, initialize_config_module

    from verl_omni.config import schema
    from verl_omni.config.keys import with_plus
    from verl_omni.trainer.forecast.forecast import forecast

    schema.register()
    found = {}
    for ranks in RANKS:
        with initialize_config_module("verl_omni.trainer.config", version_base=None):
            overrides = map(with_plus, given(work, size, frames, ranks, folder))
            config = compose("diffusion_trainer", list(overrides))
        said = forecast(config, gpus=ranks, known=known)
        found[ranks] = {stage.name: stage.peak for stage in said.asked.stages}
        usable = said.card.memory
    found[0] = {"memory": usable}
    return found


def longest(short: dict[str, float], long: dict[str, float], usable: float) -> tuple[int, str]:
    """(frames, the stage that allows no more), from the peaks with each of LENGTHS."""
    best = None
    for stage, few in short.items():
        each = (long[stage] - few) / (LENGTHS[1] - LENGTHS[0])
        if each <= 0:
            continue
        frames = int(LENGTHS[0] + (usable - few) / each)
        best = min(best or (frames, stage), (frames, stage))
    frames = (best[0] - 1) // GROUP * GROUP + 1
    return frames, best[1]


def rows(folder: Path) -> list[str]:
    from verl_omni.perf.rates import USABLE

    heads = ["model", "size", *(f"{n} GPU{'s' * (n > 1)}" for n in RANKS)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for work, (name, _) in MODELS.items():
        for shown, size in SIZES.items():
            known: dict = {}
            short, long = (peaks(work, size, frames, folder / work, known) for frames in LENGTHS)
            usable = USABLE * short[0]["memory"]
            cells = []
            for ranks in RANKS:
                frames, stage = longest(short[ranks], long[ranks], usable)
                cells.append(f"{frames} frames ({stage})" if frames > 0 else f"none ({stage})")
            lines.append(f"| {name} | {shown} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="fill its <!-- VIDEOS -->")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = rows(Path(folder))
    if options.write:
        from verl_omni.report.document_tables import fill

        options.write.write_text(fill(options.write.read_text(), "VIDEOS", "\n".join(lines)))


if __name__ == "__main__":
    main()
