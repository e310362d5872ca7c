"""The benchmark of a whole run sees when its first step is over, and that the run failed."""

import subprocess
import sys

import pytest

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
