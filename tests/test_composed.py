"""What tests compose quickly is what Hydra composes."""

import pytest
from composed import by_hydra, composed
from omegaconf import OmegaConf

A = "actor_rollout_ref."


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [f"{A}rollout.n=4", "data.train_files=[a.parquet,b.parquet]", "trainer.mode=fully_async"],
        ["++reward.custom_reward_function.reward_kwargs.seconds=4", "reward.scorers=[{name: ocr}]"],
        [f"{A}model.path='a b'", f"{A}model.path=null"],
    ],
)
def test_the_same_configuration(overrides):
    quick, real = composed(*overrides), by_hydra(*overrides)
    assert OmegaConf.to_yaml(quick) == OmegaConf.to_yaml(real)
    assert OmegaConf.is_struct(quick) and OmegaConf.is_struct(real)
    quick.trainer.mode = "separate"
    assert OmegaConf.to_yaml(composed(*overrides)) == OmegaConf.to_yaml(real), "each has its own"


@pytest.mark.parametrize("override", ["trainer.no=1", f"{A}rollout.n=many", "~trainer.mode", "[=1", "data.seed=1,2"])
def test_the_same_errors(override):
    found = []
    for make in (composed, by_hydra):
        with pytest.raises(Exception) as caught:  # noqa: B017  (whatever Hydra raises)
            make(override)
        found.append((type(caught.value), str(caught.value)))
    assert found[0] == found[1]
