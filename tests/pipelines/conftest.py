import pytest
import torch.distributed as dist


@pytest.fixture(scope="session", autouse=True)
def process_group():
    """The training engine wants a process group, of this one process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
