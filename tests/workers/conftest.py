"""One process group of one rank for all engines of this folder."""

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def in_a_process_group(process_group):
    """Every test of this folder builds engines."""


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
