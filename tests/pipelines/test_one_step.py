"""`num_inference_steps=1`, which no architecture trains with by policy gradient, and which some cannot even draw."""

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from e2e_runs import settings
from hydra import compose, initialize_config_module
from tiny_models import tiny_checkpoint

from verl_omni.config import schema
from verl_omni.testing.tiny_random import BUILDERS
from verl_omni.trainer.checks.preparation import prepare_config

schema.register()
ONE = "actor_rollout_ref.rollout.pipeline.num_inference_steps=1"


def refused(name: str, algorithm: str) -> str | None:
    given = settings("run", ONE, f"actor_rollout_ref.model.algorithm={algorithm}", model=tiny_checkpoint(name))
    if name in ("LongCatAudioDiTPipeline", "AceStepPipeline"):  # they have no pixels
        given = [one for one in given if "pipeline.height" not in one and "pipeline.width" not in one]
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        config = compose("diffusion_trainer", given)
    try:
        prepare_config(config)
    except ValueError as error:
        return str(error)
    return None


def upstream_cannot(name: str) -> bool:
    """Whether diffusers' own schedule of one step, as this checkpoint has it, is no number."""
    if not (tiny_checkpoint(name) / "scheduler").is_dir():  # the pipeline has one of its own, of equal parts
        return False
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tiny_checkpoint(name), subfolder="scheduler")
    with np.errstate(all="ignore"):
        scheduler.set_timesteps(sigmas=[1.0], **({"mu": 0.5} if scheduler.config.use_dynamic_shifting else {}))
    return not scheduler.sigmas.isfinite().all()


@pytest.mark.parametrize("name", list(BUILDERS))
def test_one_step_is_refused_where_it_cannot_be_trained_or_drawn(name):
    line = refused(name, "flow_grpo")
    assert line is not None and "num_inference_steps=1" in line and "\n" not in line
    line = refused(name, "dpo")
    if upstream_cannot(name):
        assert line is not None and "pipeline.num_inference_steps=1: expected more" in line
    elif line is not None:  # the end is counted as a step, or the only one does nothing
        assert name in ("ZImagePipeline", "MiniMaxH3ModularPipeline")
        assert "pipeline.num_inference_steps=1: expected more" in line
