"""What settings cost: peak memory and seconds of one training step, each setting in a process of its own.

    python -m benchmarks.sweep memory sd35m        # LoRA and full, checkpointing, offload
    python -m benchmarks.sweep cost sd35m          # images a step, resolution, denoising steps
    python -m benchmarks.sweep speed sd35m         # all that makes a step faster, and each of it left out
    python -m benchmarks.sweep exact sd35m         # the same, next to a computation in float32
    python -m benchmarks.sweep memory --small      # in miniature, on a CPU

The step is the trainer's own, after one that is not timed. `cost` does not compile. Prints a table; for `speed` and
`exact` with the cosine between the gradients of two steps and those of the first setting.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.local_runs import check_forks
from benchmarks.run import WORKS, settings
from benchmarks.side_by_side import NOBODY_ELSE, Turns

MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FULL = [f"{MODEL}.lora_rank=0", f"{MODEL}.target_modules=null"]
CHECKPOINTING = [f"{MODEL}.enable_gradient_checkpointing=true"]
OFFLOAD = [f"{ACTOR}.engine.param_offload=true", f"{ACTOR}.engine.optimizer_offload=true"]
UNFOLDED = [f"{ACTOR}.engine.fold_lora=false"]
LEAN = [*UNFOLDED, f"{ROLLOUT}.encoder_offload=true"]


def micro(size: int) -> list[str]:
    return [f"{ACTOR}.ppo_micro_batch_size_per_gpu={size}"]


def square(size: int) -> list[str]:
    return [f"{ROLLOUT}.pipeline.height={size}", f"{ROLLOUT}.pipeline.width={size}"]


def steps(count: int) -> list[str]:
    return [f"{ROLLOUT}.pipeline.num_inference_steps={count}"]


# name -> (images a step, overrides)
Settings = dict[str, tuple[int, list[str]]]
FEW = steps(4)  # the peak is that of one forward and backward, however many there are
MEMORY: dict[str, Settings] = {
    "sd35m": {
        "LoRA, micro-batch 44": (44, [*FEW, *micro(44)]),
        "LoRA, micro-batch 16": (16, [*FEW, *micro(16)]),
        "LoRA, micro-batch 44, checkpointing": (44, [*FEW, *micro(44), *CHECKPOINTING]),
        "full, micro-batch 16": (16, [*FEW, *FULL, *micro(16)]),
        "full, micro-batch 16, checkpointing, offload": (16, [*FEW, *FULL, *micro(16), *CHECKPOINTING, *OFFLOAD]),
    },
    "qwen-image": {
        "LoRA, micro-batch 8, folded": (16, [*FEW, *micro(8)]),
        "LoRA, micro-batch 8": (16, [*FEW, *micro(8), *UNFOLDED]),
        "LoRA, micro-batch 4, encoder offload": (16, [*FEW, *micro(4), *LEAN]),
        "LoRA, micro-batch 16, checkpointing, encoder offload": (16, [*FEW, *micro(16), *CHECKPOINTING, *LEAN]),
        "LoRA, micro-batch 16, checkpointing, all offload": (
            16,
            [*FEW, *micro(16), *CHECKPOINTING, *LEAN, *OFFLOAD],
        ),
        "full, micro-batch 1, checkpointing": (16, [*FEW, *FULL, *micro(1), *CHECKPOINTING]),
    },
}


def at_once(rows: int) -> list[str]:
    """In every forward of a step."""
    reference = f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={rows}"
    return [*micro(rows), f"{ROLLOUT}.max_num_seqs={rows}", reference]


COST: Settings = {
    "8 images, 8 at once": (8, at_once(8)),
    "16 images": (16, at_once(8)),
    "32 images": (32, at_once(8)),
    "32 images of 256 x 256, 32 at once": (32, [*at_once(32), *square(256)]),
    "2 images of 1024 x 1024, 2 at once": (2, [*at_once(2), *square(1024)]),
    "8 images, 5 steps": (8, [*at_once(8), *steps(5)]),
    "8 images, 20 steps": (8, [*at_once(8), *steps(20)]),
}
SPEED = {
    "everything on": [],
    "blocks not compiled": [f"{ACTOR}.engine.use_torch_compile=false"],
    "LoRA not folded": UNFOLDED,
    "GELU after the matrix product": [f"{ACTOR}.engine.fused_gelu=false"],
    "unconditional half computed again": [f"{ACTOR}.reuse_uncond=false"],
    "both halves of CFG in one forward": [f"{ROLLOUT}.cfg_in_one_forward=true"],
    "optimizer not fused": [f"{ACTOR}.optim.fused=false"],
    "VAE not compiled": [f"{ROLLOUT}.compile_vae=false"],
    "another attention kernel (flash)": [f"{ACTOR}.engine.attention_backend=_native_flash"],
    "2 requests in a forward": [f"{ROLLOUT}.max_num_seqs=2"],
    "2 pairs in an update's forward": micro(2),
}
SPEED_IMAGES = {"sd35m": 44, "qwen-image": 16, "tiny-sd3": 4}
EAGER = [f"{ACTOR}.engine.use_torch_compile=false", f"{ROLLOUT}.compile_vae=false"]
FLOAT32 = [f"{ACTOR}.engine.dtype=float32", f"{ACTOR}.engine.model_dtype=float32"]
BFLOAT16 = [f"{ACTOR}.engine.dtype=bfloat16"]
# A smooth reward: JPEG sizes jump with the last bit, and what two images differ by decides their advantages.
EIGHT = [*FEW, *at_once(8), f"reward.custom_reward_function.path={Path(__file__).with_name('brightness.py')}"]
EXACT: Settings = {
    "float32, nothing on": (8, [*EIGHT, *FLOAT32, *EAGER, *UNFOLDED]),
    **{name: (8, [*EIGHT, *BFLOAT16, *given]) for name, given in SPEED.items()},
}
SMALL: Settings = {
    "LoRA": (4, micro(4)),
    "LoRA, checkpointing": (4, [*micro(4), *CHECKPOINTING]),
    "full": (8, [*FULL, *micro(4)]),
}


def import_everything(count_flops: bool = False) -> None:
    """Once, for all settings: each is measured in a fork, which finds it imported. No fork may find CUDA in use."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks the driver whether there is a GPU, and leaves it alone
    import diffusers.loaders.peft  # noqa: F401
    import torch._inductor.compile_fx
    import torch._inductor.select_algorithm  # noqa: F401

    import verl_omni.testing.local_trainer  # noqa: F401
    from verl_omni.perf import flops

    if not count_flops:
        flops.PEAKS.clear()  # no FLOP rates are shown, and each setting would wait for them to be counted
    check_forks()


def two_steps(work: str, images: int, overrides: list[str], turns: Turns) -> tuple[Any, dict[str, Any]]:
    """The trainer, without Ray, after two steps; figures of the second, and how long the first one took."""
    from verl_omni.testing.local_trainer import local_config, local_trainer
    from verl_omni.trainer.diffusion.diffusion_metric_utils import compute_mfu_metrics

    with tempfile.TemporaryDirectory() as folder:
        given = [*settings(WORKS[work], images, Path(folder)), "trainer.total_training_steps=2", *overrides]
        began = time.perf_counter()
        timing: dict[str, float] = {}
        with turns.together():
            trainer = local_trainer(local_config(given))
            built, pace = time.perf_counter(), trainer.new_pace()
            _, early = trainer.training_step(pace, {})
        first = time.perf_counter()
        with turns.alone():
            trainer.actor_wg.reset_peak_memory()
            trainer.global_step += 1
            step = time.perf_counter()
            _, metrics = trainer.training_step(pace, timing)
            timing["step"] = time.perf_counter() - step
    metrics |= compute_mfu_metrics(metrics, timing)
    ratios = [told.get("actor/first_ratio_max_dev", 0.0) for told in (early, metrics)]
    metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
    metrics |= {"first step": first - built, "build": built - began, "actor/first_ratio_max_dev": max(ratios)}
    return trainer, metrics


def measure(
    work: str, images: int, overrides: list[str], moments: Path | None = None, turns: Turns = NOBODY_ELSE
) -> dict[str, float]:
    """Seconds and peak memory of the second step. Adam's first moments after it go to a file."""
    import torch

    trainer, metrics = two_steps(work, images, overrides, turns)
    if moments:
        state = trainer.actor_wg.engine.optimizer.state.values()
        torch.save(torch.cat([s["exp_avg"].detach().float().cpu().flatten() for s in state]), moments)
    peaks = {name: metrics[f"perf/max_memory_{name}_gb"] for name in ("allocated", "reserved")}
    timing = {name: value for name, value in metrics.items() if name.startswith("timing_s/")}
    return {**peaks, **{name.removeprefix("timing_s/"): value for name, value in timing.items()}}


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a process of its own. This one computes nothing: no fork of it may find threads."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
        return process.submit(function, *arguments).result()


def cosine(path: Path, other: Path) -> float:
    """Of the gradients of two runs, by the first moments that they left."""
    import torch

    one, two = torch.load(path).double(), torch.load(other).double()
    return torch.nn.functional.cosine_similarity(one, two, dim=0).item()


def row(name: str, images: int, found: dict[str, float], agreement: float | None) -> str:
    gen, update = found["gen"], found["update_actor"]
    step = gen + found.get("ref", 0.0) + found["reward"] + update
    shown = "" if agreement is None else f"{agreement:.4f}"
    memory = f"{found['allocated']:.1f} | {found['reserved']:.1f}"
    return f"| {name} | {images} | {memory} | {gen:.2f} | {update:.2f} | {step:.2f} | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "cost", "speed", "exact"])
    parser.add_argument("work", nargs="?", choices=list(MEMORY), help="the model")
    parser.add_argument("--small", action="store_true", help="a tiny model, for a CPU")
    parser.add_argument("--only", nargs="+", help="the settings whose names have one of these in them")
    options = parser.parse_args()
    if not options.small and not options.work:
        parser.error(f"name the model: {', '.join(MEMORY)}, or --small")
    work = "tiny-sd3" if options.small else options.work
    if options.what == "speed":
        table = {name: (SPEED_IMAGES[work], given) for name, given in SPEED.items()}
    elif options.what == "exact":
        table = EXACT
    else:
        table = SMALL if options.small else {"memory": MEMORY[work], "cost": COST}[options.what]
    compared = options.what in ("speed", "exact")
    if options.only:
        first = next(iter(table)) if compared else None
        named = {name for name in table if any(part in name for part in options.only)}
        if not named:
            parser.error(f"--only: no setting is called so; there are {', '.join(map(repr, table))}")
        table = {name: given for name, given in table.items() if name in named or name == first}
    import_everything()
    from torch import OutOfMemoryError

    heads = ["setting", "images", "peak GiB", "reserved GiB", "rollout s", "update s", "step s", "cosine"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, (images, overrides)) in enumerate(table.items()):
            moments = Path(folder) / f"{i}.pt"
            given = [*EAGER, *overrides] if options.what == "cost" else overrides
            try:
                found = apart(measure, work, images, given, moments)
            except OutOfMemoryError as error:
                print(f"| {name} | {images} | out of memory | | | | | |", flush=True)
                print(error, file=sys.stderr)
                continue
            agreement = apart(cosine, Path(folder) / "0.pt", moments) if compared else None
            print(row(name, images, found, agreement), flush=True)


if __name__ == "__main__":
    main()
