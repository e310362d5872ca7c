import pytest


@pytest.fixture(scope="package", autouse=True)
def in_a_process_group(process_group):
    """Every test of this folder builds engines."""
