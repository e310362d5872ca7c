"""Ranks wait for one that writes for as long as it takes, not for as long as they wait for each other to train."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine_cases import make_engine, model_config, weights
from ranks import start_ranks
from safetensors.torch import load_file
from tiny_models import tiny_checkpoint
from torch.distributed.distributed_c10d import _set_pg_timeout

from verl_omni.workers.engine import export

TIMEOUT, WRITING = timedelta(seconds=3), 5.0


def slow_on_the_first(write):
    def slowly(*args, **kwargs):
        if dist.get_rank() == 0:
            time.sleep(WRITING)
        return write(*args, **kwargs)

    return slowly


def save_slowly(rank: int, folder: str, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    engine = make_engine(model_config(path))
    groups = {parameter.device_mesh.get_group() for parameter in engine.parameters.values()}
    whole = weights(engine)
    export.FILE_BYTES = sum(t.nbytes for t in whole.values()) // 3 + 1  # a first round of two, and one more
    export._write_file = slow_on_the_first(export._write_file)
    dcp.HuggingFaceStorageWriter.write_data = slow_on_the_first(dcp.HuggingFaceStorageWriter.write_data)
    dist.barrier()
    for group in {dist.group.WORLD, *groups}:
        _set_pg_timeout(TIMEOUT, group)
    engine.save_checkpoint(f"{folder}/checkpoint")
    dist.barrier()  # they are together again
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(180)
def test_a_rank_that_writes_for_long_is_waited_for(tmp_path):
    start_ranks(save_slowly, (str(tmp_path), str(tiny_checkpoint())))
    found = {}
    for file in Path(tmp_path, "checkpoint/export/transformer").glob("*.safetensors"):
        found |= load_file(file)
    whole = torch.load(tmp_path / "whole.pt")
    assert found.keys() == whole.keys() and all(found[name].equal(whole[name]) for name in whole)
    assert len(list(Path(tmp_path, "checkpoint/export/transformer").glob("*.safetensors"))) > 2
