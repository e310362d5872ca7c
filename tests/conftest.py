"""Environment of every test. Set before torch, Ray or transformers are imported, and inherited by Ray's workers."""

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import warm

os.environ.update(
    RAY_AUTH_MODE="disabled",  # a token of another cluster on this machine must not reach ours
    RAY_USAGE_STATS_ENABLED="0",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",  # no test may depend on a download
    WANDB_MODE="offline",
)
# Kernels of these tests, for all their processes: not among the user's, and not a variable that a test changes.
KERNELS = "TORCHINDUCTOR_CACHE_DIR"
made_here = None if KERNELS in os.environ else tempfile.mkdtemp(prefix="kernels-")
if made_here:
    os.environ[KERNELS] = made_here


# With several workers a file goes to one of them, in this order and then by name: whoever gets a long one last would
# keep the others waiting. Those with a Ray of their own, which has many processes, take turns with those without.
LONGEST = [
    "e2e/test_resume.py",
    "workers/test_compiled_architectures.py",
    "preference/test_preference_ranks.py",
    "workers/test_compiled_blocks.py",
    "e2e/test_two_processes.py",
    "trainer/test_forecast.py",
    "e2e/test_two_ranks_alike.py",
    "workers/test_sequence_parallel.py",
    "pipelines/test_architectures.py",
    "e2e/test_failures.py",
    "pipelines/test_matrix.py",
    "trainer/test_server_restarts.py",
    "trainer/test_refused_settings.py",
    "e2e/test_rollout_servers.py",
    "preference/test_preference_engine.py",
    "preference/test_preference_runs.py",
    "e2e/test_every_architecture.py",
    "documented/test_documented_runs.py",
    "workers/test_rank_counts.py",
    "e2e/test_fully_async_runs.py",
    "e2e/test_toy_engine.py",
    "pipelines/test_two_ranks.py",
    "rewards/test_pool.py",
    "e2e/test_interrupts.py",
    "workers/test_vllm_omni_names.py",
]


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    gone = [str(path) for path in places if not path.is_file()]
    assert not gone, f"tests/conftest.py names files that are not there: {gone}"
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """What is random in a test, and in what it sets up, does not depend on the tests before it. Ray starts quickly."""
    if warm.WORKS and "ray._private.services" in sys.modules and os.environ["CUDA_VISIBLE_DEVICES"] == "":
        warm.let_ray_fork()
    random.seed(0)
    for name, seed in (("numpy", lambda numpy: numpy.random.seed(0)), ("torch", lambda torch: torch.manual_seed(0))):
        if name in sys.modules:
            seed(sys.modules[name])


def pytest_configure(config):
    """The tests compute on the CPU, whatever the machine has: their tolerances are those of float32 there."""
    if config.option.markexpr != "gpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VERL_PLATFORM": "cpu"}


def pytest_unconfigure():
    if made_here:
        shutil.rmtree(made_here)


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

    if dist.is_initialized():  # of a whole run in this process, which has ended
        dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
