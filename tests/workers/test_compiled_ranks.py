"""Two ranks whose blocks are compiled train as one does whose blocks are not."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_cases import assert_same, loss_function, make_engine, model_config, moved, part, roll_out, update, weights
from ranks import start_ranks
from tiny_models import tiny_checkpoint

from verl_omni.workers.engine import base
from verl_omni.workers.engine.compile.blocks import compile_blocks

MICRO = 6
LORA = [False, True]


def steps(engine, data: dict[str, torch.Tensor]) -> list[tuple[list, dict[str, torch.Tensor]]]:
    engine.micro_batch_size = MICRO
    return [(update(engine, data, loss_function(), 1), weights(engine)) for _ in range(2)]


def learned(engine) -> set[str]:
    """Without what nobody goes on with, as the last block's text: compiled, a block gives its weights a gradient of
    zero, with which they decay, and else none."""
    return {name for name, parameter in engine.parameters.items() if engine.optimizer.state.get(parameter)}


def rank_of_two(rank: int, folder: str, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    base.compile_blocks = functools.partial(compile_blocks, backend="aot_eager")  # what inductor is given, and no g++
    found = {}
    for lora in LORA:
        engine = make_engine(model_config(path, lora=lora), use_torch_compile=True, fused_gelu=False)
        found[lora] = steps(engine, part(torch.load(f"{folder}/{lora}.pt"), slice(rank, None, 2)))
        compiled = torch._dynamo.utils.counters["aot_autograd"]["ok"]
        assert compiled >= 1 + lora, "nothing was compiled"
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow  # dynamo traces each block, in two processes
@pytest.mark.timeout(400)
def test_two_ranks_with_compiled_blocks_train_as_one_without(tmp_path):
    path = str(tiny_checkpoint())
    alone, names = {}, {}
    for lora in LORA:
        engine = make_engine(model_config(path, lora=lora))
        data = roll_out(engine)
        torch.save(data, tmp_path / f"{lora}.pt")
        alone[lora], names[lora] = steps(engine, data), learned(engine)
    start_ranks(rank_of_two, (str(tmp_path), path))
    found = torch.load(Path(tmp_path, "found.pt"))
    for lora in LORA:
        (_, before), (_, after) = alone[lora]
        assert moved(after, before) > 1e-4
        for (metrics, ours), (expected, theirs) in zip(found[lora], alone[lora], strict=True):
            assert_same(*({name: one[name] for name in names[lora]} for one in (ours, theirs)))
            for one, other in zip(metrics, expected, strict=True):
                assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
