"""The settings of the sweeps are ones that a run accepts; the step they measure is the trainer's."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
import warm
from composed import composed

from benchmarks.sweep import COST, EAGER, EXACT, MEMORY, cosine

SETTINGS = [overrides for table in (*MEMORY.values(), COST, EXACT) for _, overrides in table.values()]


@pytest.mark.parametrize("overrides", SETTINGS, ids=" ".join)
def test_settings_are_known(overrides):
    composed(*overrides)


def test_a_step_in_one_process(tmp_path):
    call = f"apart(measure, 'tiny-sd3', 4, {EAGER}, {str(tmp_path / 'moments.pt')!r})"
    script, root = tmp_path / "script.py", Path(__file__).parents[2]
    script.write_text(f"import json\nfrom benchmarks.sweep import *\nimport_everything()\nprint(json.dumps({call}))")
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [*warm.quick_python(), str(script)], capture_output=True, text=True, cwd=root, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    moments = torch.load(tmp_path / "moments.pt")
    assert moments.isfinite().all() and moments.norm() > 0  # of a step that has learned something
    assert found["gen"] > 0 and found["ref"] > 0 and found["update_actor"] > 0


def test_the_cosine_is_that_of_the_angle(tmp_path):
    for angle in (0.0, 30.0, 90.0, 150.0):
        torch.save(torch.tensor([1.0, 0.0]), tmp_path / "one.pt")
        turned = torch.tensor([math.cos(math.radians(angle)), math.sin(math.radians(angle))])
        torch.save(3 * turned, tmp_path / "two.pt")
        found = cosine(tmp_path / "one.pt", tmp_path / "two.pt")
        assert found == pytest.approx(math.cos(math.radians(angle)), abs=1e-6)


def test_weights_do_not_depend_on_their_dtype():
    """Or a computation in float32 could not be compared with one in bfloat16."""
    from verl_omni.pipelines.utils import random_model

    def drawn(dtype: torch.dtype) -> torch.Tensor:
        torch.manual_seed(0)
        return random_model(lambda: torch.nn.Linear(32, 32), dtype).weight

    assert drawn(torch.float32).dtype == torch.float32 and drawn(torch.float32).std() > 0
    assert torch.equal(drawn(torch.float32), drawn(torch.bfloat16).float())
