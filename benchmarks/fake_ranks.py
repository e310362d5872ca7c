"""One rank of many, on one GPU: what it needs, at real size, through the real training worker.

    python -m benchmarks.fake_ranks qwen-image --ranks 8 16 64              # all weights are trained
    python -m benchmarks.fake_ranks qwen-image --ranks 8 --lora 64
    python -m benchmarks.fake_ranks flux-dev --ranks 1 8 --lora 32          # how much slower is one of 8, a row?
    python -m benchmarks.fake_ranks flux-dev --ranks 1 8 --lora 32 --profile outputs    # and where it goes
    python -m benchmarks.fake_ranks --small --ranks 2 8                     # a tiny model, on a CPU

torch's fake process group runs rank 0 of N with its true share of weights, gradients and optimizer, and sends nothing.
The random weights of the other ranks are this one's again, copied to where they would arrive, so numbers mean nothing;
memory and computing time do. Each step draws the rank's samples, with the whole model gathered, and trains on one
denoising step of each. The last update is done three times, and the middle one counts. A profile is of another rollout
and another update, after what is timed. Further arguments are overrides of the training config.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.run import WORKS, settings
from benchmarks.side_by_side import NOBODY_ELSE, Turns

MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GIB = 2**30
STEPS = 3  # of which the first compiles, and the second has the optimizer's state
TIMED = 3  # updates of the last step, of which the middle one counts
AT_ONCE = 4  # rows in a forward, and in a backward


def join_fake_group(ranks: int) -> None:
    """This process is rank 0 of so many."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "0"}  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    real_subgroups = dist.new_subgroups

    def fake_subgroups(size: int, **kwargs: Any) -> Any:
        return real_subgroups(size, **kwargs | {"backend": "fake"})

    dist.new_subgroups = fake_subgroups  # those of gloo would wait for the others
    dist.reduce_scatter_tensor = own_part  # before torch 2.12 what came out was whatever lay there, NaN too


def own_part(output: Any, input: Any, *args: Any, **kwargs: Any) -> None:
    """The first rank's, of a group of any size: a copy of the weights may be shared by fewer than there are."""
    output.copy_(input.chunk(input.numel() // output.numel())[0].reshape(output.shape))


def rank_settings(work: str, ranks: int, rows: int, lora: int, folder: Path) -> list[str]:
    """Of so many ranks, each with so many samples, of which one denoising step is trained."""
    at_once = min(rows, AT_ONCE)
    return [
        *settings(WORKS[work], rows * ranks, folder),
        f"data.train_batch_size={ranks}", f"{ACTOR}.ppo_mini_batch_size={ranks}", f"{ROLLOUT}.n={rows}",
        f"{MODEL}.lora_rank={lora}", *([] if lora else [f"{MODEL}.target_modules=null"]),
        f"{MODEL}.enable_gradient_checkpointing=true", f"{ACTOR}.use_kl_loss=false",
        f"{ACTOR}.first_ratio_tolerance=null", f"{ACTOR}.ppo_micro_batch_size_per_gpu={at_once}",
        f"{ROLLOUT}.pipeline.num_inference_steps=4", f"{ROLLOUT}.algo.sde_window_size=1",
        f"{ROLLOUT}.max_num_seqs={at_once}", f"{ROLLOUT}.compile_vae=false", f"trainer.n_gpus_per_node={ranks}",
    ]  # fmt: skip


def measure(
    work: str,
    ranks: int,
    rows: int,
    lora: int,
    overrides: list[str],
    turns: Turns = NOBODY_ELSE,
    profile: Path | None = None,
) -> dict[str, float]:
    """Of the last step: seconds, and peak memory in GiB, of the update and of the rollout.

    A rank has nobody to wait for: what `update ms a row` is more than that of a single one is what being one of many
    costs its own GPU.
    """
    import torch

    join_fake_group(ranks)
    from verl_omni.testing.local_trainer import local_config
    from verl_omni.workers.diffusion_worker import DiffusionWorker

    device = torch.cuda if torch.cuda.is_available() else None
    found: dict[str, float] = {"ranks": ranks, "rows": rows}

    @contextlib.contextmanager
    def measured(name: str) -> Iterator[None]:
        if device:
            device.reset_peak_memory_stats()
        began = time.perf_counter()
        yield
        if device:
            device.synchronize()
            found.update({f"{name} GiB": device.max_memory_allocated() / GIB,
                          f"{name} reserved GiB": device.max_memory_reserved() / GIB})  # fmt: skip
        found[f"{name} s"] = time.perf_counter() - began

    with tempfile.TemporaryDirectory() as folder:
        config = local_config([*rank_settings(work, ranks, rows, lora, Path(folder)), *overrides])
        with turns.together(), measured("build"):
            worker = DiffusionWorker(config)
            worker.init_model()
        held = [p.to_local() if hasattr(p, "to_local") else p for p in worker.engine.module.parameters()]
        for part in worker.engine.adapter.trained_modules(worker.engine.module).values():
            part.register_forward_hook(channels_apart)
        found |= {"parameters": sum(p.numel() for p in held), "held GiB": sum(p.nbytes for p in held) / GIB}
        for step in range(STEPS):
            with turns.alone() if step == STEPS - 1 else turns.together():
                with measured("rollout"):
                    outputs = draw(worker, rows)
                batch = as_batch(worker, outputs, step)
                took = []
                for _ in range(TIMED if step == STEPS - 1 else 1):
                    with measured("update"):
                        worker.update_actor(batch)
                    took.append(found["update s"])
                found["update s"] = statistics.median(took)
            found.setdefault("first rollout s", found["rollout s"])
            found.setdefault("first update s", found["update s"])
            if profile and step == STEPS - 1:
                with profiled(worker, profile / f"rollout of {ranks}"):
                    draw(worker, rows)
                with profiled(worker, profile / f"update of {ranks}"):
                    worker.update_actor(batch)
            worker.release((str(step),))
    return found | {"update ms a row": 1e3 * found["update s"] / rows, "fastest to slowest s": [min(took), max(took)]}


def channels_apart(module: Any, given: Any, output: tuple) -> tuple:
    """Where a last layer's rows repeat, all channels of a token have one value. Now and then it is 0, and Qwen-Image's
    CFG divides by their norm."""
    import torch

    sample, *others = output
    return (sample + torch.linspace(-0.01, 0.01, sample.shape[-1], device=sample.device).to(sample.dtype), *others)


@contextlib.contextmanager
def profiled(worker: Any, folder: Path) -> Iterator[None]:
    from verl_omni.perf.step_profile import StepProfile

    folder.mkdir(parents=True, exist_ok=True)
    profile = StepProfile(worker.engine.device)
    profile.start()
    yield
    profile.stop(folder)


def draw(worker: Any, rows: int) -> list[Any]:
    """Samples of this rank, with what training needs of each."""
    from verl_omni.pipelines.drawing import Request

    engine, model = worker.rollout, worker.model_config
    tokenizers, limit = engine.adapter.load_tokenizers(model), model.pipeline.max_sequence_length
    ids, negative = (
        engine.adapter.tokenize(tokenizers, text.ljust(118, "."), limit) for text in ("a photograph", "blurred")
    )
    params = {"keep_trajectory": True, "keep_uncond": True, "sde_window": (0, 1)}
    worker.start_rollout()
    requests = [Request(ids, negative, None, params | {"seed": row}) for row in range(rows)]
    with mock.patch("verl_omni.pipelines.drawing.check_finite"):  # weights that repeat may draw anything
        outputs = engine.draw_batch(requests)
    worker.stop_rollout()
    return outputs


def as_batch(worker: Any, outputs: list[Any], step: int) -> Any:
    """What the driver would send, with made-up advantages."""
    import numpy as np
    import torch
    from verl.protocol import DataProto

    kept = [worker.trajectories.keep(f"{step}/{row}", output) for row, output in enumerate(outputs)]
    small = {name: torch.stack([torch.as_tensor(one.trajectory[name]) for one in kept]) for name in kept[0].trajectory}
    shape = small["all_timesteps"].shape
    small |= {
        "old_log_probs": small["rollout_log_probs"],
        "advantages": torch.linspace(-1, 1, len(kept))[:, None].expand(shape).clone(),
        "sample_id": torch.arange(len(kept)),
    }
    references = np.empty(len(kept), dtype=object)
    references[:] = [one.reference for one in kept]
    told = {"epochs": 1, "num_mini_batches": 1}
    return DataProto.from_dict(small, non_tensors={"trajectory": references}, meta_info=told)


def row(ranks: int, found: dict[str, float], single: dict[str, float] | None) -> str:
    shown = ("held GiB", "update GiB", "update reserved GiB", "rollout GiB", "update s", "rollout s", "build s")
    figures = " | ".join(f"{found[name]:.2f}" if name in found else "" for name in shown)
    ratio = f"{against(found, single):.3f}" if single else ""
    return f"| {ranks} | {found['parameters'] / 1e9:.3f} | {figures} | {ratio} |"


def against(found: dict[str, float], single: dict[str, float]) -> float:
    """Seconds of a row's update, as a multiple of those of a rank that has nobody beside it."""
    return found["update s"] / found["rows"] / (single["update s"] / single["rows"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="?", help=f"the model: {', '.join(WORKS)}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8], help="of how many it is one (%(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="images that the rank trains on (%(default)s)")
    parser.add_argument("--lora", type=int, default=0, help="rank of a LoRA; 0 trains all weights (%(default)s)")
    parser.add_argument("--small", action="store_true", help="a tiny model, for a CPU")
    parser.add_argument("--profile", type=Path, help="a folder for profiles of a rollout and an update of each")
    parser.add_argument("--json", type=Path, help="write all figures here too")
    options, overrides = parser.parse_known_args()
    work = "tiny-qwen-image" if options.small else options.work
    if work not in WORKS:
        parser.error(f"name the model: {', '.join(WORKS)}, or --small")
    heads = ["rank 0 of", "billion parameters", "held, GiB", "update, GiB", "reserved", "rollout, GiB", "update, s",
             "rollout, s", "build, s", "a row, to that of a single rank"]  # fmt: skip
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    results = {}
    for ranks in options.ranks:
        given = (work, ranks, options.rows, options.lora, overrides, NOBODY_ELSE, options.profile)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:  # a process group each
            results[ranks] = process.submit(measure, *given).result()
        print(row(ranks, results[ranks], results.get(1)), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"work": work, "lora": options.lora, "rows": options.rows,
                                                "overrides": overrides, "ranks": results}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
