"""A training engine is what `protocol.py` says: workers and rollout engines ask for nothing else."""

import ast
from pathlib import Path

import pytest

import verl_omni.workers
from verl_omni.workers.engine.fsdp.diffusers_impl import DiffusersFSDPEngine
from verl_omni.workers.engine.protocol import TrainingEngine

ROOM = Path(verl_omni.workers.__file__).parent
# Where an engine is held, and what it is called there.
ASK = {
    "diffusion_worker.py": "engine",
    "rollout/diffusers_rollout/engine.py": "training",
    "rollout/vllm_rollout/engine.py": "training",
    "engine/checkpoint_io.py": "engine",
    "engine/export.py": "engine",
}


def asked_of(name: str, file: str) -> set[str]:
    """Attributes of `name`, or of `self.<name>`, in a file."""
    found = set()
    for node in ast.walk(ast.parse((ROOM / file).read_text())):
        if isinstance(node, ast.Attribute):
            holder = node.value
            if (isinstance(holder, ast.Name) and holder.id == name and file != "diffusion_worker.py") or (
                isinstance(holder, ast.Attribute) and holder.attr == name and file == "diffusion_worker.py"
            ):
                found.add(node.attr)
    return found


@pytest.mark.parametrize("file", ASK)
def test_nothing_is_asked_that_the_protocol_does_not_name(file):
    asked = asked_of(ASK[file], file)
    promised = {*TrainingEngine.__annotations__, *dir(TrainingEngine)}
    assert asked and asked <= promised, asked - promised


def test_an_engine_without_what_is_asked_is_none():
    assert not DiffusersFSDPEngine.__abstractmethods__
    assert {"initialize", "train_batch", "infer_batch", "whole", "policy"} <= TrainingEngine.__abstractmethods__
