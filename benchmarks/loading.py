"""What loading a model costs each rank in memory: its own share, and never the whole.

    python -m benchmarks.loading                                 # a model of 457 million parameters, 1, 2 and 4 ranks
    python -m benchmarks.loading --write docs/performance.md     # the table, where the document says <!-- LOADING -->

Each rank is a process (gloo, a CPU) that builds the training engine from a folder of bfloat16 weights in several files.
Peak is the largest resident memory of any of them while it does, above what it held before. Linux only.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from verl_omni.config import CheckpointConfig, DiffusionModelConfig, FSDPConfig, OptimizerConfig
from verl_omni.report.document_tables import fill
from verl_omni.testing.tiny_random import build_tiny_random

MIB = 2**20
ALLOWED = 1.3  # times a rank's share and the largest block
RANKS = (1, 2, 4)
# (lora_rank, settings of the engine)
WAYS = {
    "all weights, float32": (0, {"dtype": "bfloat16"}),
    "LoRA of rank 8, frozen bfloat16": (8, {"dtype": "bfloat16"}),
}


def write_model(folder: Path, layers: int, width: int) -> Path:
    """A Qwen-Image folder whose transformer is larger than the tiny one's; 36 * width ** 2 parameters a layer."""
    from diffusers import QwenImageTransformer2DModel

    model = build_tiny_random("QwenImagePipeline", folder)
    config = QwenImageTransformer2DModel.load_config(model / "transformer")
    config |= {"num_layers": layers, "num_attention_heads": width // config["attention_head_dim"]}
    shutil.rmtree(model / "transformer")
    torch.set_default_dtype(torch.bfloat16)
    QwenImageTransformer2DModel.from_config(config).save_pretrained(model / "transformer", max_shard_size="256MB")
    torch.set_default_dtype(torch.float32)
    return model


def peak_of(load: Callable[[], None]) -> int:
    """Bytes of resident memory that it takes at most, above what is held before."""
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    load()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 - before


def rank_main(rank: int, ranks: int, model: str, way: str, out: str) -> None:
    import peft  # noqa: F401  (libraries are no part of the model)

    from verl_omni.workers.engine.compile.blocks import repeated_blocks
    from verl_omni.workers.engine.fsdp.diffusers_impl import DiffusersFSDPEngine

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{out}/store")
    lora_rank, settings = WAYS[way]
    config = DiffusionModelConfig(path=model, lora_rank=lora_rank)
    engine = DiffusersFSDPEngine(config, FSDPConfig(**settings), OptimizerConfig(), CheckpointConfig())
    blocks = repeated_blocks(engine.adapter.build_module(config, engine.model_dtype))
    block = max(sum(p.numel() * p.element_size() for p in b.parameters()) for b in blocks)
    peak = peak_of(engine.initialize)
    held = [p.to_local() if hasattr(p, "to_local") else p for p in engine.module.parameters()]
    Path(out, f"{rank}.json").write_text(json.dumps([peak, sum(p.nbytes for p in held), block]))
    dist.barrier()
    dist.destroy_process_group()


def measure(model: Path, way: str, ranks: int) -> list[int]:
    """(peak of the rank that took most, its share, the largest block)."""
    with tempfile.TemporaryDirectory() as out:
        spawn(rank_main, (ranks, str(model), way, out), nprocs=ranks)
        return max(json.loads(path.read_text()) for path in Path(out).glob("*.json"))


def table(found: dict[tuple[str, int], list[int]]) -> str:
    lines = [
        "| trained | ranks | a rank's share, MiB | largest block | allowed | peak of a rank |",
        "|---|---|---|---|---|---|",
    ]
    for (way, ranks), (peak, share, block) in found.items():
        figures = (share, block, ALLOWED * (share + block), peak)
        lines.append(f"| {way} | {ranks} | {' | '.join(f'{figure / MIB:,.0f}' for figure in figures)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="fill its <!-- LOADING -->")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), options.layers, options.width)
        found = {(way, ranks): measure(model, way, ranks) for way in WAYS for ranks in options.ranks}
    print(table(found))
    if options.write:
        options.write.write_text(fill(options.write.read_text(), "LOADING", table(found)))
    worst = max(peak / (share + block) for peak, share, block in found.values())
    print(f"at most {worst:.2f} times a rank's share and the largest block")
    if worst > ALLOWED:
        raise SystemExit(f"error: more than {ALLOWED}")


if __name__ == "__main__":
    main()
