"""The documented hooks of the runner."""

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import Role

from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.trainer.main_diffusion import TaskRunner


def test_the_reference_has_no_worker_of_its_own():
    runner, config = TaskRunner(), OmegaConf.structured(DiffusionTrainerConfig)
    worker = runner.actor_class = runner.add_actor_rollout_worker(config)
    runner.add_ref_policy_worker(config, worker)
    assert set(runner.role_worker_mapping) == {Role.ActorRollout}
    with pytest.raises(ValueError, match="lives in the worker that trains, DiffusionWorker.*Other would not be used"):
        runner.add_ref_policy_worker(config, type("Other", (worker,), {}))
