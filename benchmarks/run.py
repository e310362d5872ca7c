"""Time the real training step: build a model of the real size with random weights, train it, print a table.

    python -m benchmarks.run sd35m            # SD3.5-medium, one GPU
    python -m benchmarks.run sd35m --runs 2 --steps 1 --warm-up 1    # how long its second start takes
    python -m benchmarks.run qwen-image       # Qwen-Image 20B, one GPU
    python -m benchmarks.run flux-dev flux2-klein z-image wan-1.3b   # the others, few images: do they run, how fast
    python -m benchmarks.run ltx2 wan-ti2v-5b --images 8             # videos, with and without sound
    python -m benchmarks.run all --steps 1 --warm-up 1 --json all.json   # every architecture at its size, one table
    python -m benchmarks.run --small          # both in miniature, on a CPU

Further arguments are overrides of the training config. The first steps (compiling) are left out of the averages.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import models
from verl_omni.utils.run_files import read_metrics

ATTENTION = (
    "[attn.add_k_proj,attn.add_q_proj,attn.add_v_proj,attn.to_add_out,attn.to_k,attn.to_out.0,attn.to_q,attn.to_v]"
)
MODEL_STAGES = ("gen_denoise", "gen_decode", "ref", "update_actor")  # the rest of a step is neither transformer nor VAE
COMPILING = "perf/compiling_s"
STAGES = (
    *("gen", "gen_wake", "gen_weights", "gen_encode", "gen_denoise", "gen_decode", "gen_sleep", "gen_rewards"),
    *("ref", "old_log_prob", "reward", "update_actor", "step"),
)


@dataclass
class Work:
    """What is trained, and what others have reached on the same work (images a GPU and second)."""

    model: str
    images: int
    overrides: list[str]
    yardsticks: dict[str, float] = field(default_factory=dict)
    negative: bool = True  # whether it reads negative prompts


COMMON = [
    "actor_rollout_ref.model.load_format=dummy",
    "actor_rollout_ref.rollout.pipeline.num_inference_steps=10",
    "trainer.val_before_train=false",
    "trainer.save_freq=0",
    "trainer.test_freq=0",
    "trainer.logger=[jsonl]",
    "trainer.resume_mode=disable",
    "reward.num_workers=4",
    "actor_rollout_ref.rollout.agent.num_workers=2",
]
SQUARE_512 = ["actor_rollout_ref.rollout.pipeline.height=512", "actor_rollout_ref.rollout.pipeline.width=512"]
SQUARE_32 = ["actor_rollout_ref.rollout.pipeline.height=32", "actor_rollout_ref.rollout.pipeline.width=32"]
SD3 = [
    "actor_rollout_ref.rollout.pipeline.guidance_scale=4.5",
    "actor_rollout_ref.rollout.pipeline.max_sequence_length=128",
    "actor_rollout_ref.model.lora_rank=32",
    f"actor_rollout_ref.model.target_modules={ATTENTION}",
    "actor_rollout_ref.actor.use_kl_loss=true",
]
LEAN = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
QWEN = [
    "actor_rollout_ref.rollout.pipeline.true_cfg_scale=4",
    "actor_rollout_ref.rollout.algo.sde_window_size=2",
    "actor_rollout_ref.model.lora_rank=64",
]

# The files of videos with sound want a package that a benchmark can do without.
LTX2 = [
    "actor_rollout_ref.rollout.pipeline.guidance_scale=3",
    "actor_rollout_ref.rollout.pipeline.audio_guidance_scale=3",
    "actor_rollout_ref.rollout.algo.audio_share=0.3",
    "trainer.log_train_groups=0",
    "reward.scorers=[{name: audio_video_sync, weight: 1}]",
]


def few(model: str, overrides: list[str], images: int = 16, negative: bool = True) -> Work:
    """Few images of a model that is not tuned for speed here: LoRA on attention, two trained steps."""
    return Work(
        model,
        images,
        [*SQUARE_512, "actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.rollout.algo.sde_window_size=2",
         "actor_rollout_ref.rollout.max_num_seqs=8", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
         *overrides],
        negative=negative,
    )  # fmt: skip


WORKS = {
    "sd35m": Work(
        "sd35_medium",
        176,
        # Updates of 44 rows: on an H200 matrix products and attention take 1.6 % less a row than with 48. Rollout
        # and reference have 22, one size, so that one graph serves both; a rollout of 44 rows is no faster.
        [*SQUARE_512, *SD3, "actor_rollout_ref.rollout.max_num_seqs=22",
         "actor_rollout_ref.rollout.cfg_in_one_forward=false",
         "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=22",
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=44"],
        {"flow_grpo's own loop, same card, batch 24": 1.19, "plain torch prototype, compiled": 2.90},
    ),
    "qwen-image": Work(
        "qwen_image",
        32,
        [*SQUARE_512, *QWEN, "actor_rollout_ref.rollout.max_num_seqs=16",
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"],
        {"verl-omni, published, 4 x H800": 0.305},
    ),
    "flux-dev": few("flux_dev", ["actor_rollout_ref.rollout.pipeline.guidance_scale=3.5"]),
    "flux2-klein": few("flux2_klein", ["actor_rollout_ref.rollout.pipeline.guidance_scale=4"]),
    "z-image": few("z_image", ["actor_rollout_ref.rollout.pipeline.guidance_scale=4"]),
    "wan-1.3b": few(
        "wan_1_3b",
        ["actor_rollout_ref.rollout.pipeline.guidance_scale=5", "actor_rollout_ref.rollout.pipeline.num_frames=17",
         f"reward.custom_reward_function.path={Path(__file__).with_name('brightness.py')}"],
    ),
    "wan-ti2v-5b": few(
        "wan_ti2v_5b",
        ["actor_rollout_ref.rollout.pipeline.guidance_scale=5", "actor_rollout_ref.rollout.pipeline.num_frames=49",
         f"reward.custom_reward_function.path={Path(__file__).with_name('brightness.py')}"],
    ),
    "glm-image": few("glm_image", ["actor_rollout_ref.rollout.pipeline.guidance_scale=1.5"], negative=False),
    "ltx2": few(
        "ltx2",
        [*LTX2, "actor_rollout_ref.rollout.pipeline.num_frames=49",
         "actor_rollout_ref.rollout.pipeline.max_sequence_length=256",
         "actor_rollout_ref.model.enable_gradient_checkpointing=true"],
    ),
    "tiny-ltx2": Work(
        "tiny_ltx2",
        8,
        [*SQUARE_32, *LTX2, "actor_rollout_ref.rollout.pipeline.num_frames=5", "actor_rollout_ref.model.lora_rank=4",
         "actor_rollout_ref.rollout.max_num_seqs=8", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"],
    ),
    "sd35-large": few("sd35_large", ["actor_rollout_ref.rollout.pipeline.guidance_scale=4.5"]),
    "flux2-dev": few("flux2_dev", ["actor_rollout_ref.rollout.pipeline.guidance_scale=4", LEAN]),
    "qwen-image-edit": few(
        "qwen_image_edit",
        ["actor_rollout_ref.rollout.pipeline.true_cfg_scale=4", "actor_rollout_ref.rollout.max_num_seqs=4",
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", LEAN],
    ),
    "wan2.2": few(
        "wan_2_2",
        ["actor_rollout_ref.rollout.pipeline.height=480", "actor_rollout_ref.rollout.pipeline.width=832",
         "actor_rollout_ref.rollout.pipeline.guidance_scale=4", "actor_rollout_ref.rollout.pipeline.num_frames=33",
         "actor_rollout_ref.rollout.max_num_seqs=1", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
         f"reward.custom_reward_function.path={Path(__file__).with_name('brightness.py')}", LEAN],
        images=2,
    ),
    "tiny-sd3": Work(
        "tiny_sd3",
        8,
        [*SQUARE_32, *SD3, "actor_rollout_ref.rollout.max_num_seqs=8",
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"],
    ),
    "tiny-qwen-image": Work(
        "tiny_qwen_image",
        8,
        [*SQUARE_32, *QWEN, "actor_rollout_ref.rollout.max_num_seqs=8",
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"],
    ),
}  # fmt: skip
ALL = [name for name in WORKS if not name.startswith("tiny-")]


def settings(work: Work, images: int, folder: Path) -> list[str]:
    """The config of one optimizer step a training step, with model, prompts and run in `folder`."""
    group = 16 if images % 16 == 0 else images
    return [
        *COMMON,
        *work.overrides,
        f"actor_rollout_ref.model.path={getattr(models, work.model)(folder / 'model')}",
        f"data.train_files={write_prompts(folder / 'prompts.jsonl', 'edit' in work.model, work.negative)}",
        f"data.train_batch_size={images // group}",
        f"actor_rollout_ref.rollout.n={group}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={images // group}",
        f"trainer.default_local_dir={folder}/run",
    ]


def measure(
    name: str, steps: int, warm_up: int, images: int | None, profile: bool, overrides: list[str]
) -> dict[str, float]:
    """Means (and the spread of the step time) over the steps after the warm-up; a profiled step is one more."""
    work = WORKS[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "verl_omni.trainer.main_diffusion",
            *settings(work, images or work.images, Path(folder)),
            f"trainer.total_training_steps={steps + warm_up + profile}",
            *([f"trainer.profile_step={steps + warm_up + 1}"] if profile else []),
            *overrides,
        ]  # fmt: skip
        metrics = Path(folder) / "run/metrics.jsonl"
        to_first_step = trained(command, metrics)
        lines = [entry["data"] for entry in read_metrics(metrics)]
        if profile:
            print(f"\nprofile of one step of {name}\n" + (Path(folder) / "run/profile.txt").read_text())
    first, timed = lines[0], lines[warm_up : warm_up + steps]
    result = {k: statistics.mean(line[k] for line in timed) for k in timed[0] if all(k in line for line in timed)}
    result |= {f"first {stage}": first[f"timing_s/{stage}"] for stage in STAGES if f"timing_s/{stage}" in first}
    result |= {"command to first step": to_first_step, "compiling": sum(line.get(COMPILING, 0.0) for line in lines)}
    result["slowest"] = max(line["timing_s/step"] for line in timed)
    result["fastest"] = min(line["timing_s/step"] for line in timed)
    result["actor/first_ratio_max_dev"] = max(line["actor/first_ratio_max_dev"] for line in lines)
    return result


def trained(command: list[str], metrics: Path) -> float:
    """Seconds until the first step of a run was over, once the whole of it is."""
    began, first = time.perf_counter(), None
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            if first is None and metrics.exists() and read_metrics(metrics):
                first = time.perf_counter() - began
            time.sleep(0.1)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return first or time.perf_counter() - began


def write_prompts(path: Path, images: bool = False, negative: bool = True) -> Path:
    """`images`: each prompt speaks of one. `negative`: each has a negative prompt."""
    rows = [
        {"data_source": "jpeg_compressibility", "prompt": f"a photograph of scene {i:03d} at dusk".ljust(118, "."),
         "reward_model": {"style": "rule", "ground_truth": ""}}
        for i in range(64)
    ]  # fmt: skip
    if negative:
        rows = [row | {"negative_prompt": "blurred".ljust(118, ".")} for row in rows]
    if images:
        from PIL import Image

        picture = path.with_name("picture.png")
        Image.new("RGB", (512, 512), "teal").save(picture)
        rows = [row | {"images": [str(picture)]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(name: str, result: dict[str, float]) -> str:
    images, seconds = result["perf/total_num_images"], result["timing_s/step"]
    lines = [f"{name}: {images / seconds:.2f} images/s ({images:.0f} images a step)"]
    for peer, rate in WORKS[name].yardsticks.items():
        lines.append(f"  {images / seconds / rate:.2f} x  {peer}: {rate} images/s")
    lines.append(f"  {'stage':14}{'s':>8}{'ms/image':>10}{'TFLOP/s':>9}{'MFU':>7}")
    for stage in STAGES:
        if f"timing_s/{stage}" in result:
            time = result[f"timing_s/{stage}"]
            rate, mfu = result.get(f"perf/tflops/{stage}"), result.get(f"perf/mfu/{stage}")
            shown = f"{rate:9.0f}{mfu:7.1%}" if rate else f"{'-':>9}{'-':>7}"
            lines.append(f"  {stage:14}{time:8.2f}{time * 1000 / images:10.1f}{shown}")
    outside = 1 - sum(result.get(f"timing_s/{stage}", 0.0) for stage in MODEL_STAGES) / seconds
    lines.append(f"  {outside:.1%} of the step outside of the transformer and the VAE")
    lines.append(
        f"  step {result['fastest']:.2f} to {result['slowest']:.2f} s; "
        f"peak {result['perf/max_memory_allocated_gb']:.1f} GiB; first ratio off 1 by at most "
        f"{result['actor/first_ratio_max_dev']:.1e}"
    )
    first = ", ".join(f"{k.removeprefix('first ')} {v:.1f}" for k, v in result.items() if k.startswith("first "))
    lines.append(f"  first step, with compiling, in s: {first}")
    lines.append(
        f"  from the command to the end of its first step {result['command to first step']:.0f} s; the worker waited "
        f"{result['compiling']:.1f} s for the compiler in all steps"
    )
    return "\n".join(lines)


def overview(results: dict[str, list[dict[str, float]]]) -> str:
    """One row a model."""
    heads = ["model", "images/s", "step, s", "peak, GiB", "first step, s", "rollout", "update", "VAE, s", "first ratio"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, runs in results.items():
        if not runs:
            lines.append(f"| {name} | failed: see above |" + " |" * (len(heads) - 2))
            continue
        run = runs[-1]
        rates = (f"{run[f'perf/tflops/{s}']:.0f} TFLOP/s" if f"perf/tflops/{s}" in run else ""
                 for s in ("gen", "update_actor"))  # fmt: skip
        lines.append(
            f"| {name} | {run['perf/total_num_images'] / run['timing_s/step']:.2f} | {run['timing_s/step']:.2f} | "
            f"{run['perf/max_memory_allocated_gb']:.1f} | {run['first step']:.0f} | {' | '.join(rates)} | "
            f"{run.get('timing_s/gen_decode', 0.0):.2f} | {run['actor/first_ratio_max_dev']:.1e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("work", nargs="*", help=f"any of {', '.join(WORKS)}, or all")
    parser.add_argument("--small", action="store_true", help="tiny models, for a CPU")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them (%(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="whole runs; later ones find kernels cached (%(default)s)")
    parser.add_argument("--images", type=int, help="images a step")
    parser.add_argument("--profile", action="store_true", help="say where the device's time goes, in one step more")
    parser.add_argument("--json", type=Path, help="write all figures here too")
    options, rest = parser.parse_known_args()
    names = [w for w in options.work if "=" not in w] or (["tiny-sd3", "tiny-qwen-image"] if options.small else [])
    names = ALL if names == ["all"] else names
    overrides = [w for w in options.work if "=" in w] + rest
    if not names or any(n not in WORKS for n in names):
        parser.error(f"name what to time: {', '.join(WORKS)}, or --small")
    results: dict[str, list[dict[str, float]]] = {}
    for name in names:
        runs = results[name] = []
        for run in range(options.runs):
            profile = options.profile and run == 0
            try:
                runs.append(measure(name, options.steps, options.warm_up, options.images, profile, overrides))
            except subprocess.CalledProcessError:
                if len(names) == 1:
                    raise
                print(f"{name}: failed\n", flush=True)  # its own line is above; the others are not held up
                break
            print("\n" + table(name, runs[-1]) + "\n", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
        rates = [f"{run['perf/total_num_images'] / run['timing_s/step']:.3f}" for run in runs]
        starts = [f"{run['command to first step']:.0f} ({run['compiling']:.0f} for the compiler)" for run in runs]
        print(f"{name}: {len(runs)} runs, images/s: {', '.join(rates)}")
        print(f"{name}: s from the command to the end of its first step: {', '.join(starts)}\n", flush=True)
    if len(names) > 1:
        print(overview(results), flush=True)
    if not all(results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
