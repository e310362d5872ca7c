"""One process group of one rank for all engines of this folder."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "algorithms"))  # loss_cases: the formulas, written out


@pytest.fixture(scope="package", autouse=True)
def process_group():
    if dist.is_initialized():  # another folder's, which lives to the end of the session
        yield
        return
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
