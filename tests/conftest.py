"""Environment of every test. Set before torch, Ray or transformers are imported, and inherited by Ray's workers."""

import os
import sys

import pytest

os.environ.update(
    RAY_AUTH_MODE="disabled",  # a token of another cluster on this machine must not reach ours
    RAY_USAGE_STATS_ENABLED="0",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",  # no test may depend on a download
    WANDB_MODE="offline",
)


def pytest_configure(config):
    """The tests compute on the CPU, whatever the machine has: their tolerances are those of float32 there."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def stop_ray_at_the_end():
    """A test may leave its Ray running for the next one; the session leaves none behind."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


@pytest.fixture(scope="session")
def process_group():
    """The training engine wants a process group, of this one process. One serves all tests that ask for it."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
