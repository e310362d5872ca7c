"""These tests need the environment of `make veomni`."""

import pytest
import torch

from verl_omni.workers.engine.veomni.veomni_impl import installed

if not installed():  # test_installed.py says so
    collect_ignore_glob = ["test_[!i]*.py"]


@pytest.fixture(scope="package", autouse=True)
def in_a_process_group(process_group):
    """Every test of this folder builds engines."""


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
