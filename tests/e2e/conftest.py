import pytest
from e2e_runs import LEARNING, Run, settings, user_folder


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """The folder of a run of three steps in one process, to compare others with."""
    folder = user_folder(tmp_path_factory.mktemp("whole"))
    Run(settings("run", *LEARNING), folder).succeed()
    return folder / "run"
