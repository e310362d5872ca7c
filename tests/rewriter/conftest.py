import pytest


@pytest.fixture(autouse=True)
def in_a_process_group(process_group):
    """One rank, as engines expect."""
