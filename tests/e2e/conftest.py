import pytest
from e2e_runs import LEARNING, QuickRun, settings, user_folder
from filelock import FileLock


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory, worker_id):
    """The folder of a run of three steps in one process, to compare with. It is made once, whoever asks first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "whole"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            made = user_folder(tmp_path_factory.mktemp("making"))
            QuickRun(settings("run", *LEARNING), made).succeed()
            made.rename(folder)
    return folder / "run"
