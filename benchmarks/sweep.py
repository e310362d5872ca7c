"""What settings cost: peak memory and seconds of one training step, each setting in a process of its own.

    python -m benchmarks.sweep memory sd35m        # LoRA and full, checkpointing, offload
    python -m benchmarks.sweep cost sd35m          # images a step, resolution, denoising steps
    python -m benchmarks.sweep speed sd35m         # all that makes a step faster, and each of it left out
    python -m benchmarks.sweep memory --small      # in miniature, on a CPU

The step is the trainer's own, after one that is not timed. `memory` and `cost` do not compile. Prints a table; for
`speed` with the cosine between the gradients of two steps and those of the first setting.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.run import WORKS, settings

MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FULL = [f"{MODEL}.lora_rank=0"]
CHECKPOINTING = [f"{MODEL}.enable_gradient_checkpointing=true"]
OFFLOAD = [f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.fsdp_config.optimizer_offload=true"]
UNFOLDED = [f"{ACTOR}.fsdp_config.fold_lora=false"]


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
        "LoRA, micro-batch 48": (16, [*FEW, *micro(48)]),
        "LoRA, micro-batch 16": (16, [*FEW, *micro(16)]),
        "LoRA, micro-batch 48, checkpointing": (16, [*FEW, *micro(48), *CHECKPOINTING]),
        "full, micro-batch 16": (16, [*FEW, *FULL, *micro(16)]),
        "full, micro-batch 16, checkpointing": (16, [*FEW, *FULL, *micro(16), *CHECKPOINTING]),
        "full, micro-batch 16, checkpointing, offload": (16, [*FEW, *FULL, *micro(16), *CHECKPOINTING, *OFFLOAD]),
    },
    "qwen-image": {
        "LoRA, micro-batch 4, folded": (8, [*FEW, *micro(4)]),
        "LoRA, micro-batch 4": (8, [*FEW, *micro(4), *UNFOLDED]),
        "LoRA, micro-batch 2": (8, [*FEW, *micro(2), *UNFOLDED]),
        "LoRA, micro-batch 16, checkpointing": (8, [*FEW, *micro(16), *CHECKPOINTING, *UNFOLDED]),
        "LoRA, micro-batch 16, checkpointing, offload": (
            8,
            [*FEW, *micro(16), *CHECKPOINTING, *UNFOLDED, *OFFLOAD],
        ),
    },
}
COST: Settings = {
    "8 images": (8, []),
    "16 images": (16, []),
    "32 images": (32, []),
    "8 images of 256 x 256": (8, square(256)),
    "8 images of 1024 x 1024": (8, [*square(1024), *micro(8)]),
    "8 images, 5 steps": (8, steps(5)),
    "8 images, 20 steps": (8, steps(20)),
}
SPEED: Settings = {
    "everything on": (48, []),
    "blocks not compiled": (48, [f"{ACTOR}.fsdp_config.use_torch_compile=false"]),
    "LoRA not folded": (48, UNFOLDED),
    "GELU after the matrix product": (48, [f"{ACTOR}.fsdp_config.fused_gelu=false"]),
    "unconditional half computed again": (48, [f"{ACTOR}.reuse_uncond=false"]),
    "VAE not compiled": (48, [f"{ROLLOUT}.compile_vae=false"]),
}
EAGER = [f"{ACTOR}.fsdp_config.use_torch_compile=false", f"{ROLLOUT}.compile_vae=false"]
SMALL: Settings = {
    "LoRA": (4, micro(4)),
    "LoRA, checkpointing": (4, [*micro(4), *CHECKPOINTING]),
    "full": (8, [*FULL, *micro(4)]),
}


def measure(work: str, images: int, overrides: list[str], moments: str) -> dict[str, float]:
    """In this process: seconds and peak memory of the second step. Adam's first moments after it go to a file."""
    import torch
    from hydra import compose, initialize_config_module

    from benchmarks.local_trainer import LocalTrainer
    from verl_omni.trainer.config import schema
    from verl_omni.trainer.preflight import preflight
    from verl_omni.trainer.resources import choose_device

    schema.register()
    with tempfile.TemporaryDirectory() as folder:
        given = [
            *settings(WORKS[work], images, Path(folder)),
            "trainer.total_training_steps=2",
            f"trainer.device={choose_device(None)}",
            *overrides,
        ]
        with initialize_config_module("verl_omni.trainer.config", version_base=None):
            config = preflight(compose("diffusion_trainer", given))
        trainer = LocalTrainer(config)
        trainer.init_workers()
        batches = iter(trainer.train_loader)
        timing: dict[str, float] = {}
        trainer.training_step(next(batches), {})
        trainer.actor_wg.reset_peak_memory()
        trainer.global_step += 1
        _, metrics = trainer.training_step(next(batches), timing)
    state = trainer.actor_wg.engine.optimizer.state.values()
    torch.save(torch.cat([s["exp_avg"].detach().float().cpu().flatten() for s in state]), moments)
    peaks = {name: metrics[f"perf/max_memory_{name}_gb"] for name in ("allocated", "reserved")}
    return {**peaks, **timing}


def cosine(path: Path, other: Path) -> float:
    """Of the gradients of two runs, by the first moments that they left."""
    import torch

    one, two = torch.load(path).double(), torch.load(other).double()
    return torch.nn.functional.cosine_similarity(one, two, dim=0).item()


def row(name: str, images: int, found: dict[str, float] | str, agreement: float | None) -> str:
    if isinstance(found, str):
        return f"| {name} | {images} | {found} | | | | | |"
    gen, update = found["gen"], found["update_actor"]
    step = gen + found.get("ref", 0.0) + found["reward"] + update
    shown = "" if agreement is None else f"{agreement:.4f}"
    memory = f"{found['allocated']:.1f} | {found['reserved']:.1f}"
    return f"| {name} | {images} | {memory} | {gen:.2f} | {update:.2f} | {step:.2f} | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "cost", "speed"])
    parser.add_argument("work", nargs="?", choices=list(MEMORY), help="the model")
    parser.add_argument("--small", action="store_true", help="a tiny model, for a CPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a setting as JSON: measured here, in this process
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*json.loads(options.one))))
        return
    if not options.small and not options.work:
        parser.error(f"name the model: {', '.join(MEMORY)}, or --small")
    work = "tiny-sd3" if options.small else options.work
    table = SMALL if options.small else {"memory": MEMORY[work], "cost": COST, "speed": SPEED}[options.what]
    heads = ["setting", "images", "peak GiB", "reserved GiB", "rollout s", "update s", "step s", "cosine"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, (images, overrides)) in enumerate(table.items()):
            moments = Path(folder) / f"{i}.pt"
            given = overrides if options.what == "speed" else [*EAGER, *overrides]
            one = json.dumps([work, images, given, str(moments)])
            command = [sys.executable, "-m", "benchmarks.sweep", options.what, "--one", one]
            done = subprocess.run(command, capture_output=True, text=True)
            agreement = None
            if done.returncode == 0:
                found = json.loads(done.stdout.splitlines()[-1])
                if options.what == "speed":
                    agreement = cosine(Path(folder) / "0.pt", moments)
            elif "out of memory" in done.stderr.lower():
                found = "out of memory"
            else:
                sys.exit(f"error: {name} failed\n{done.stderr[-3000:]}")
            print(row(name, images, found, agreement), flush=True)


if __name__ == "__main__":
    main()
