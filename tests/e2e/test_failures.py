"""A reward that fails or ends its process: the run ends with that error shown, and does not hang.

test_two_processes.py has a training worker that dies.
"""

import re

import pytest
from e2e_runs import Run, settings

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

@pytest.mark.slow
def test_a_reward_that_ends_its_process_is_one_line(tmp_path):
    (tmp_path / "reward.py").write_text("import os\n\ndef compute_score(prompt):\n    os._exit(1)\n")
    run = Run(settings("run", "reward.custom_reward_function.path=reward.py"), tmp_path)
    assert run.wait() == 1
    *_, last = run.output().splitlines()
    assert re.match(r"error: reward process 0 \(pid \d+\) died during the (validation|rewards)\b", last)
    assert "Traceback" not in run.output()


@pytest.mark.slow  # trainer/test_failure_lines.py has the way of such an error through Ray, without a run
def test_a_failing_reward_ends_the_run_with_one_line(tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(prompt):\n    return {}[prompt]\n")
    run = Run(settings("run", "reward.custom_reward_function.path=reward.py"), tmp_path)
    assert run.wait() == 1
    *_, last = (line for line in run.output().splitlines() if line.strip())
    assert last.startswith("error: reward function compute_score (reward.py) raised KeyError: 'a")
    assert "Traceback" not in run.output()
