"""Out of memory names knobs that exist, for the stage that ran out."""

import re

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from verl_omni.config import schema
from verl_omni.perf.memory import KNOBS, names_memory_knobs


@pytest.mark.parametrize("stage", KNOBS)
def test_the_error_names_knobs_of_a_run(stage):
    @names_memory_knobs(stage)
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError, match=f"the {stage} ran out of GPU memory") as raised:
        full()
    assert "Tried to allocate" in str(raised.value.__cause__)
    schema.register()
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        config = compose("diffusion_trainer")
    named = re.findall(r"(?:actor_rollout_ref|trainer)\.[\w.]+", str(raised.value))
    assert named
    for knob in named:
        parent, name = knob.rsplit(".", 1)
        assert name in OmegaConf.select(config, parent), knob


def test_other_errors_pass_through():
    @names_memory_knobs("update")
    def broken() -> None:
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        broken()
