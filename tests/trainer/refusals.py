"""What the checks before a run make of settings."""

import pytest
from composed import composed
from omegaconf import DictConfig
from tiny_models import tiny_checkpoint

from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.trainer.failures import users_mistake

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"


def prepared(*overrides: str, architecture: str = "QwenImagePipeline") -> DictConfig:
    given = [
        f"{MODEL}.path={tiny_checkpoint(architecture)}",
        f"{ROLLOUT}.pipeline.height=32",
        f"{ROLLOUT}.pipeline.width=32",
        f"{ROLLOUT}.pipeline.num_inference_steps=4",
        "data.train_files=prompts.parquet",
        *overrides,
    ]
    return prepare_config(composed(*given))


def refused(*overrides: str, architecture: str = "QwenImagePipeline") -> str:
    """The line that the user gets."""
    with pytest.raises(Exception) as caught:  # noqa: B017  (users_mistake says whether it is one line)
        prepared(*overrides, architecture=architecture)
    line = users_mistake(caught.value)
    assert line is not None, f"a traceback for a user's mistake: {caught.value!r}"
    return line
