"""Rollout engines side by side on one device, asked for the same images: speed, memory, weights, log-probabilities.

    python -m benchmarks.engines sd35m qwen-image --out outputs/engines    # one GPU, real sizes
    python -m benchmarks.engines --small --out outputs/engines             # both in miniature, on a CPU
    python -m benchmarks.engines sd35m --only diffusers pipeline --out outputs/engines    # without vLLM-Omni

`vllm_omni` runs where vLLM-Omni is installed (docs/vllm_omni.md). `pipeline` is plain inference, for comparison:
diffusers' own, its blocks compiled, called with batches of prompts. It has no LoRA and keeps nothing.

The model has random weights in bfloat16 (float32 in miniature). Each engine has a process of its own, built as a
rollout server builds it, takes LoRA weights (with `--full` all weights), and draws a burst twice: the second one
counts. Then the training engine computes the log-probabilities of what each has drawn, with the same weights. Prints
a table in Markdown.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.run import QWEN, SD3, SQUARE_32, SQUARE_512, write_prompts

ARR = "actor_rollout_ref"
ENGINES = ("diffusers", "vllm_omni")
PLAIN = "pipeline"


@dataclass
class Work:
    """A model, how many images of it, how many in a batch."""

    model: str
    images: int
    batch: int
    overrides: list[str]


STEPS = f"{ARR}.rollout.pipeline.num_inference_steps=10"
WORKS = {
    "sd35m": Work("sd35_medium_with_t5", 88, 22, [*SQUARE_512, *SD3, STEPS]),
    "qwen-image": Work("qwen_image", 32, 16, [*SQUARE_512, *QWEN, STEPS]),
    "tiny-sd3": Work("tiny_sd3", 8, 4, [*SQUARE_32, *SD3, f"{ARR}.model.lora_rank=4"]),
    "tiny-qwen-image": Work("tiny_qwen_image", 8, 4, [*SQUARE_32, *QWEN, f"{ARR}.model.lora_rank=4"]),
}


def configured(name: str, folder: Path, full: bool) -> Any:
    """The configuration of a run with this work, as its workers get it."""
    from hydra import compose, initialize_config_module

    from verl_omni.config.schema import register
    from verl_omni.trainer.checks.preparation import prepare_config

    register()
    work = WORKS[name]
    overrides = [
        *work.overrides,
        f"{ARR}.model.path={folder}",
        f"data.train_files={write_prompts(folder / 'prompts.jsonl')}",
        f"{ARR}.rollout.max_num_seqs={work.batch}",
        f"{ARR}.rollout.cfg_in_one_forward=false",
        f"{ARR}.hybrid_engine=false",
    ]
    if full:
        overrides = [one for one in overrides if "target_modules" not in one] + [f"{ARR}.model.lora_rank=0"]
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        return prepare_config(compose("diffusion_trainer", overrides))


def trained_weights(config: Any, folder: Path) -> dict[str, Any]:
    """What training would send: adapters that do something, or the folder's own weights."""
    import torch
    from omegaconf import OmegaConf

    from verl_omni.workers.rollout.vllm_rollout.loading import FolderWeights, trained_and_frozen

    model_config = OmegaConf.to_object(config.actor_rollout_ref.model)
    names, _ = trained_and_frozen(model_config, ["transformer"])
    if not model_config.lora_rank:
        stored = FolderWeights(folder / "transformer")
        return {own: stored.read(own) for own in (name.removeprefix("transformer.") for name in names)}
    generator = torch.Generator().manual_seed(0)
    return {
        name.removeprefix("transformer."): 0.02 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in names.items()
    }


def draw(name: str, engine_name: str, folder: Path, full: bool) -> dict[str, float]:
    """Figures of one engine; what it drew is written beside the model."""
    import torch
    from safetensors.torch import save_file

    from verl_omni.pipelines.model_base import DiffusionModelBase
    from verl_omni.workers.rollout import server_class

    config = configured(name, folder, full)
    on_gpu = torch.cuda.is_available()
    start = time.perf_counter()
    server = server_class(engine_name)(config)
    asyncio.run(server.start())
    engine, found = server.engine, {"start": time.perf_counter() - start}
    weights = trained_weights(config, folder)
    for step in ("first_weights", "weights"):
        start = time.perf_counter()
        engine.update_weights(iter(weights.items()), 1)
        _wait(on_gpu)
        found[step] = time.perf_counter() - start
    del weights

    adapter = DiffusionModelBase.get_class(server.model_config)
    tokenizers = adapter.load_tokenizers(server.model_config)
    length = server.model_config.pipeline.max_sequence_length
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    images = WORKS[name].images
    window = (0, min(3, adapter.num_steps(server.model_config) - 1))

    async def burst() -> list[Any]:
        calls = []
        for i in range(images):
            row = rows[i // 16 % len(rows)]
            params = {"seed": i, "position": (i, images), "sde_window": window, "keep_trajectory": True}
            ids, negative = (adapter.tokenize(tokenizers, row[k], length) for k in ("prompt", "negative_prompt"))
            calls.append(engine.generate(ids, params, str(i), negative_prompt_ids=negative))
        return await asyncio.gather(*calls)

    for step in ("first_draw", "draw"):
        engine.begin()
        start = time.perf_counter()
        outputs = asyncio.run(burst())
        _wait(on_gpu)
        found[step] = time.perf_counter() - start
    found["images_per_second"] = images / found["draw"]
    kept = [output.trajectory | output.conditions for output in outputs]
    columns = {key: torch.stack([row[key].cpu().contiguous() for row in kept]) for key in kept[0]}
    save_file(columns, folder / f"{engine_name}.safetensors")
    return found


def draw_plainly(name: str, folder: Path) -> dict[str, float]:
    """Figures of what a user without this project would call."""
    import inspect

    import torch
    from diffusers import DiffusionPipeline

    config = configured(name, folder, full=False)
    on_gpu, work = torch.cuda.is_available(), WORKS[name]
    start = time.perf_counter()
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16 if on_gpu else torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if on_gpu:
        pipe.to("cuda").transformer.compile_repeated_blocks(fullgraph=True)
    found = {"start": time.perf_counter() - start}
    known = inspect.signature(pipe.__call__).parameters
    pipeline = config.actor_rollout_ref.rollout.pipeline
    settings = {name: value for name, value in pipeline.items() if name in known and value is not None}
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    for step in ("first_draw", "draw"):
        start = time.perf_counter()
        for first in range(0, work.images, work.batch):
            numbers = range(first, min(first + work.batch, work.images))
            asked = [rows[i // 16 % len(rows)] for i in numbers]
            texts = {key: [row[key] for row in asked] for key in ("prompt", "negative_prompt")}
            seeds = [torch.Generator().manual_seed(i) for i in numbers]
            pipe(**settings | texts, generator=seeds, output_type="pt")
        _wait(on_gpu)
        found[step] = time.perf_counter() - start
    return found | {"images_per_second": work.images / found["draw"]}


def replay(name: str, folder: Path, full: bool) -> dict[str, dict[str, float]]:
    """Engine -> how far its log-probabilities are from those of the training graph, with the same weights."""
    import torch.distributed as dist
    from omegaconf import OmegaConf
    from safetensors.torch import load_file

    from verl_omni.workers.engine.registry import engine_class
    from verl_omni.workers.rollout.diffusers_rollout import copy_all

    config = configured(name, folder, full)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    actor = OmegaConf.to_object(config.actor_rollout_ref.actor)
    cls = engine_class(actor.strategy)
    model_config = OmegaConf.to_object(config.actor_rollout_ref.model)
    engine = cls(model_config, cls.settings(actor), actor.optim, actor.checkpoint)
    engine.initialize()
    engine.micro_batch_size = 2
    copy_all(trained_weights(config, folder).items(), engine.parameters, "not trained")
    found = {}
    for drawn in [name for name in ENGINES if (folder / f"{name}.safetensors").exists()]:
        data = load_file(folder / f"{drawn}.safetensors")
        data = {key: value[:16].to(engine.device) for key, value in data.items()}
        with engine.train_mode():
            output = engine.infer_batch(data, training_graph=not engine.rounds_like_rollout)["model_output"]
        gone = output["log_probs"].view_as(data["rollout_log_probs"]).double() - data["rollout_log_probs"].double()
        found[drawn] = {
            "drift_mean": gone.abs().mean().item(),
            "ratio_max_dev": (gone.exp() - 1).abs().max().item(),
            "ratio_mean_dev": (gone.exp() - 1).abs().mean().item(),
        }
    return found


def _wait(on_gpu: bool) -> None:
    import torch

    if on_gpu:
        torch.cuda.synchronize()


def child(arguments: list[str]) -> Any:
    """One part of the work in a process of its own, which leaves its memory with it."""
    command = [sys.executable, "-m", "benchmarks.engines", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, dict[str, float]]) -> str:
    columns = {
        "images/s": ("images_per_second", "{:.2f}"),
        "first burst, s": ("first_draw", "{:.1f}"),
        "weights, s": ("weights", "{:.2f}"),
        "first weights, s": ("first_weights", "{:.1f}"),
        "start, s": ("start", "{:.0f}"),
        "log-prob off, mean": ("drift_mean", "{:.1e}"),
        "ratio off 1, mean": ("ratio_mean_dev", "{:.1e}"),
        "ratio off 1, most": ("ratio_max_dev", "{:.1e}"),
    }
    lines = ["| engine | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for engine, figures in found.items():
        cells = [form.format(figures[key]) if key in figures else "" for key, form in columns.values()]
        lines.append(f"| {engine} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="*", help=f"any of {', '.join(WORKS)}")
    parser.add_argument("--small", action="store_true", help="tiny models, for a CPU")
    parser.add_argument("--only", nargs="+", choices=[*ENGINES, PLAIN], default=ENGINES, help="which of them")
    parser.add_argument("--full", action="store_true", help="send all weights, not LoRA")
    parser.add_argument("--out", type=Path, required=True, help="folder for the models, as large as real ones")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.work or (["tiny-sd3", "tiny-qwen-image"] if options.small else [])
    if not names or any(name not in WORKS for name in names):
        parser.error(f"name what to compare: {', '.join(WORKS)}, or --small")
    if options.part == "build":
        (name,) = names
        getattr(models, WORKS[name].model)(options.out / name)
        if not name.startswith("tiny"):
            models.write_weights(options.out / name, "cuda" if torch.cuda.is_available() else "cpu")
        print("{}")
        return
    if options.part:
        (name,) = names
        given = (options.out / name, options.full)
        if options.part == PLAIN:
            found = draw_plainly(name, given[0])
        else:
            found = replay(name, *given) if options.part == "replay" else draw(name, options.part, *given)
        print("\n" + json.dumps(found))
        return
    for name in names:
        given = [name, "--out", str(options.out), *(["--full"] if options.full else [])]
        if not (options.out / name / "model_index.json").exists():
            child([*given, "--part", "build"])
        found = {}
        for engine in options.only:
            found[engine] = child([*given, "--part", engine])
            print(f"{name} {engine} {json.dumps(found[engine])}", flush=True)
        for engine, drift in child([*given, "--part", "replay"]).items():
            found[engine] |= drift
        print(f"\n{name}, {'all weights' if options.full else 'LoRA'}\n\n{table(found)}", flush=True)


if __name__ == "__main__":
    main()
