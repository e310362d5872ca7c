"""Matrix products in 8 bits: right, and how much faster than bfloat16; and whether a model learns the same with them.

    python -m benchmarks.fp8 check --json fp8.json      # on a GPU: tensor cores against the emulation, and rates
    python -m benchmarks.fp8 check --small              # the same calls on a CPU
    python -m benchmarks.fp8 images --out outputs/fp8   # the quickstart's checkpoint: one seed, both precisions
    python -m benchmarks.fp8 learn --out outputs/fp8    # the quickstart's task: in full, in 8 bits, corrected, pool

`learn` runs each seed of each kind in a process with one thread, as many at once as there are cores. On a CPU the
numbers are those of a GPU up to the order of sums, and seconds are not: it emulates 8 bits. Runs that are there already
are not repeated.

`check` has one column more where torchao is installed (pip install torchao): the same product in its layers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import find_torchao
from benchmarks.learning_table import at
from benchmarks.staleness import SCORE, quickstart_settings
from benchmarks.timing import seconds
from verl_omni.utils.run_files import read_metrics
from verl_omni.workers.engine.fp8 import product, quantised, refuse_old_gpu

# rows, inputs, outputs: SD3.5-medium with 22 rows of 1024 tokens, Qwen-Image with 16 of 1024
SIZES = {
    "SD3.5-medium, attention": (22528, 1536, 1536),
    "SD3.5-medium, first of the MLP": (22528, 1536, 6144),
    "SD3.5-medium, second of the MLP": (22528, 6144, 1536),
    "Qwen-Image, attention": (16384, 3072, 3072),
    "Qwen-Image, first of the MLP": (16384, 3072, 12288),
    "Qwen-Image, second of the MLP": (16384, 12288, 3072),
}
SMALL = {"small": (64, 128, 256)}
# What the tensor cores keep of a sum while they add it up (fast accumulation) is some 14 bits.
TOLERANCE = 2.0**-7
VALIDATIONS = 5  # of a run of `learn`, after the one at its start
ROLLOUT, POOL = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.pool"
FP8 = [f"{ROLLOUT}.precision=fp8"]
KINDS = {
    "drawn as trained": [],
    "drawn in 8 bits": FP8,
    "drawn in 8 bits, corrected": [*FP8, "algorithm.rollout_correction.rollout_is=step"],
    "pool of 32 in 8 bits": [f"{POOL}.size=32", f"{POOL}.precision=fp8"],
}


def check(sizes: dict[str, tuple[int, int, int]], device: str) -> dict[str, dict[str, float]]:
    """How far the device's product is from the emulation's, as a share of its size; TFLOP/s of three ways or four."""
    refuse_old_gpu(device)
    if not find_torchao():
        print("torchao is not installed: its layers are not compared")
    elif device != "cuda":
        print("torchao computes in 8 bits on a GPU only: its layers are not compared")
    found = {}
    compiled = torch.compile(product, dynamic=False) if device == "cuda" else product
    for name, (rows, inner, outer) in sizes.items():
        torch.manual_seed(0)
        x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        x[:, ::97] *= 20  # some channels stand out
        weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16) / inner**0.5
        bias = torch.randn(outer, device=device, dtype=torch.bfloat16)
        held, scale = quantised(weight)
        some = x[:: max(1, rows // 64)]
        exact = (some.double() @ weight.double().t() + bias.double()).cpu()
        emulated = product(some.cpu(), held.cpu(), scale.cpu(), bias.cpu(), torch.float32).double()
        ways: dict[str, Callable] = {
            "bfloat16": lambda x=x, w=weight, b=bias: torch.nn.functional.linear(x, w, b),
            "fp8": lambda x=x, h=held, s=scale, b=bias: product(x, h, s, b, torch.bfloat16),
            "fp8, compiled": lambda x=x, h=held, s=scale, b=bias: compiled(x, h, s, b, torch.bfloat16),
        }
        layer = torchaos(weight, bias, device)
        if layer is not None:  # a compiled layer has no truth of its own
            ways["torchao, compiled"] = lambda x=x, layer=layer: layer(x)
        own = [ways[way]()[:: max(1, rows // 64)].double().cpu() for way in ("fp8", "fp8, compiled")]
        theirs = layer(x)[:: max(1, rows // 64)].double().cpu() if layer is not None else None
        found[name] = {
            "off emulation": max(((o - emulated).norm() / emulated.norm()).item() for o in own),
            "off float64": ((own[0] - exact).norm() / exact.norm()).item(),
            **({"torchao off float64": ((theirs - exact).norm() / exact.norm()).item()} if layer is not None else {}),
            **{way: 2e-12 * rows * inner * outer / seconds(call, device) for way, call in ways.items()},
        }
        print(f"{name:34}" + "".join(f"  {k} {v:.4g}" for k, v in found[name].items()), flush=True)
    worst = max(line["off emulation"] for line in found.values())
    if worst > TOLERANCE:
        sys.exit(f"error: the product in 8 bits is off by {worst:.2g} of its size, more than {TOLERANCE:.2g}")
    return found


def torchaos(weight: torch.Tensor, bias: torch.Tensor, device: str) -> torch.nn.Module | None:
    """A layer in torchao's 8 bits with a scale a row, as ours has; None where torchao is not installed, or there is no
    GPU: it emulates nothing."""
    if not find_torchao() or device != "cuda":
        return None
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], device=device, dtype=torch.bfloat16)
    layer.load_state_dict({"weight": weight, "bias": bias})
    with_torchao(layer.requires_grad_(False))
    return torch.compile(layer, dynamic=False)


def with_torchao(module: torch.nn.Module, chosen: Callable[[torch.nn.Module, str], bool] | None = None) -> None:
    """Its linear layers, or those that are chosen, in torchao's 8 bits."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    quantize_(module, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), chosen)


def train(folder: Path, kind: str, seed: int, steps: int) -> None:
    from verl_omni.testing.local_trainer import local_config, local_trainer

    local_trainer(local_config([
        *quickstart_settings(folder.parent), *KINDS[kind],
        f"trainer.default_local_dir={folder}", f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={max(1, steps // VALIDATIONS)}", "trainer.save_freq=0", "trainer.resume_mode=disable",
        *(f"{name}={seed}" for name in ("trainer.seed", "data.seed", f"{ROLLOUT}.seed")),
    ])).fit()  # fmt: skip


def run(out: Path, kind: str, seed: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """A whole run in a process of its own; its held-out scores, after so many steps and seconds of training."""
    folder = out / f"{list(KINDS).index(kind)}_{seed}_{steps}"
    if not (folder / "report.html").exists():
        given = ["learn", f"--out={out}", f"--one={folder}", f"--kind={kind}", f"--seed={seed}", f"--steps={steps}"]
        with (out / f"{folder.name}.log").open("w") as log:
            command = [sys.executable, "-m", "benchmarks.fp8", *given]
            subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, check=True)
        print(f"{kind}, seed {seed} ...", file=sys.stderr, flush=True)
    points, seconds = [], 0.0
    for row in read_metrics(folder / "metrics.jsonl"):
        seconds += row["data"].get("timing_s/step", 0.0)
        if SCORE in row["data"]:
            points.append({"step": row["step"], "seconds": seconds, "score": row["data"][SCORE]})
    return {"points": points}


def learn(options: argparse.Namespace) -> dict[str, list[dict[str, list[dict[str, float]]]]]:
    from verl_omni.quickstart.data import write_data

    write_data(options.out)
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = {k: [pool.submit(run, options.out, k, s, options.steps) for s in range(options.seeds)] for k in KINDS}
        found = {kind: [one.result() for one in own] for kind, own in runs.items()}
    print(by(found, "step", "after {:.0f} steps"))
    print("\n" + by(found, "seconds", "after {:.0f} s of training"))
    return found


def by(found: dict[str, list[dict[str, list[dict[str, float]]]]], axis: str, head: str) -> str:
    """Mean scores at the start and at each third of what the shortest run has of steps or seconds; each seed's last."""
    last = min(run["points"][-1][axis] for runs in found.values() for run in runs)
    places = [last * third / 3 for third in range(4)]
    heads = ["images of training", *(head.format(place) for place in places), "each seed at last"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for kind, runs in found.items():
        scores = [[at(run, axis, place) for place in places] for run in runs]
        means = " | ".join(f"{statistics.mean(column):.3f}" for column in zip(*scores, strict=True))
        lines.append(f"| {kind} | {means} | {' '.join(f'{one[-1]:.3f}' for one in scores)} |")
    return "\n".join(lines)


def images(out: Path, count: int = 8) -> dict[str, float]:
    """Two rows of one sheet, and how far pixels are apart (of 255, root of the mean square)."""
    from PIL import Image

    from verl_omni.config import DiffusionModelConfig, DiffusionPipelineConfig, DiffusionRolloutConfig, EngineConfig
    from verl_omni.pipelines.drawing import Request
    from verl_omni.quickstart.task import CHECKPOINT
    from verl_omni.workers.engine.fp8 import Fp8Layers
    from verl_omni.workers.engine.module import build_module, fill_module
    from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout

    size = DiffusionPipelineConfig(height=16, width=32, num_inference_steps=10, max_sequence_length=128)
    config, device = DiffusionModelConfig(path=str(CHECKPOINT), pipeline=size), torch.device("cpu")
    module, parts = build_module(config, EngineConfig().seed, torch.float32, None)
    fill_module(module, config, device, torch.float32)
    rollout = DiffusersRollout(DiffusionRolloutConfig(), config, module.eval(), device, torch.float32)
    rollout.fp8 = Fp8Layers(parts.values(), rollout.adapter.fp8_modules, device, torch.float32)
    rollout.fp8.hold(fold=False)
    tokens = rollout.adapter.load_tokenizers(config)
    texts = [f'a sign that reads "{number}"' for number in range(103, 1000, 111)][:count]
    rows, ode = [], {"noise_level": 0.0, "sde_type": "sde"}
    for precision in (None, "fp8"):
        asked = [
            Request(rollout.adapter.tokenize(tokens, text, 128), None, None, {"seed": i, "precision": precision} | ode)
            for i, text in enumerate(texts)
        ]
        rows.append(torch.stack([answer.response for answer in rollout.run_batch(asked)]))
    sheet = torch.cat([torch.cat(list(row), dim=2) for row in rows], dim=1).permute(1, 2, 0).numpy()
    picture = Image.fromarray(sheet)
    picture.resize((4 * picture.width, 4 * picture.height), Image.NEAREST).save(out / "both_precisions.png")
    apart = (rows[0].float() - rows[1].float()).square().mean().sqrt().item()
    contrast = rows[0].float().std().item()
    print(f"pixels are {apart:.2f} apart (of 255; their deviation is {contrast:.1f}): {out / 'both_precisions.png'}")
    return {"apart": apart, "deviation": contrast}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["check", "images", "learn"])
    parser.add_argument("--small", action="store_true", help="check on a CPU")
    parser.add_argument("--out", type=Path, help="folder of the runs, or of the sheet")
    parser.add_argument("--steps", type=int, default=50, help="training steps of each run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (%(default)s)")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="runs at once (%(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures here too")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # a single run, in this process
    parser.add_argument("--kind", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train(options.one, options.kind, options.seed, options.steps)
        return
    if options.what == "check":
        found = check(SMALL, "cpu") if options.small else check(SIZES, "cuda")
    elif options.out is None:
        parser.error(f"{options.what} needs --out, a folder")
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        found = images(options.out) if options.what == "images" else learn(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
