"""The benchmark of a whole run sees when its first step is over, and that the run failed; forks can use CUDA."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.local_runs import check_forks
from benchmarks.run import trained

SCRIPT = """
import sys, time
time.sleep(1)
with open(sys.argv[1], "w") as file:
    file.write('{"step": 1, "data": {}}\\n')
time.sleep(float(sys.argv[2]))
"""


def test_the_time_to_the_first_step_is_not_that_of_the_whole_run(tmp_path):
    seconds = trained([sys.executable, "-c", SCRIPT, str(tmp_path / "metrics.jsonl"), "8"], tmp_path / "metrics.jsonl")
    assert 1 <= seconds < 8


def test_a_run_that_fails_is_told(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        trained([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "metrics.jsonl")


# Stands for the library that begins to use CUDA when it is imported, wherever diffusers finds it.
TORCHAO = "import torch\ntorch.cuda.is_initialized = lambda: True\n"
FORKS = """
from benchmarks import {module}
{module}.import_everything()
import torch
assert not torch.cuda.is_initialized()
from benchmarks import find_torchao
assert find_torchao()
import torchao
assert torch.cuda.is_initialized()
"""


@pytest.mark.parametrize("module", ["local_runs", "sweep"])
def test_a_library_that_uses_cuda_on_import_is_left_for_the_forks(module, tmp_path):
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao/__init__.py").write_text(TORCHAO)
    (tmp_path / "torchao-0.99.dist-info").mkdir()
    (tmp_path / "torchao-0.99.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.99\n")
    paths = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    subprocess.run([sys.executable, "-c", FORKS.format(module=module)], env=os.environ | paths, check=True)


def test_what_uses_cuda_nevertheless_is_told(monkeypatch):
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: True)
    with pytest.raises(SystemExit, match="no fork can use it"):
        check_forks()
