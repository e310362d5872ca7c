"""A launcher that imports an extension and calls `main()`: workers import what it imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from verl_omni.utils import external_lib
from verl_omni.utils.external_lib import with_registered

HERE = Path(__file__).parent


@pytest.fixture
def registered(monkeypatch):
    """What a launcher's imports have registered; all of it importable but for the last."""
    modules = {
        "my_algo": 'algorithm "my_algo"',
        "my_model_flow_grpo.diffusers_training_adapter": "...",
        "by_path": "...",
    }
    monkeypatch.setattr(external_lib, "registrations", modules)
    return modules


def test_modules_of_a_launcher_are_carried_over(registered):
    carried = ["my_algo", "my_model_flow_grpo.diffusers_training_adapter"]
    assert with_registered(None) == carried
    assert with_registered("other, another") == ["other", "another", *carried]


def test_what_external_lib_brings_in_is_not_named_again(registered):
    assert with_registered("my_model_flow_grpo,my_algo") == "my_model_flow_grpo,my_algo"
    assert with_registered(["my_algorithms"]) == ["my_algorithms", *with_registered(None)]


def test_without_extensions_nothing_changes(monkeypatch):
    monkeypatch.setattr(external_lib, "registrations", {})
    assert with_registered(None) is None and with_registered("mine") == "mine"


def test_a_script_that_registers_by_itself_is_told_so_before_anything_starts(tmp_path):
    lines = (HERE / "my_mix.py").read_text(), "from verl_omni.trainer.main_diffusion import main\nmain()\n"
    (tmp_path / "script.py").write_text("\n".join(lines))
    done = subprocess.run(
        [*warm.quick_python(), "script.py", "actor_rollout_ref.model.algorithm=my_mix"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith(
        "error: the script that was started registers model adapter of QwenImagePipeline for algorithm"
    )
    assert "move that into a module of its own" in last
