"""One tiny run for all tests that look at what a run leaves behind."""

import pytest
from tiny_runs import tiny_settings


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, process_group):
    """Two steps with LoRA, validated and saved after each: (the run's folder)."""
    from verl_omni.testing.local_trainer import local_config, local_trainer

    folder = tmp_path_factory.mktemp("trained")
    more = {
        "actor_rollout_ref.model.lora_rank": 4,
        "actor_rollout_ref.model.lora_alpha": 8,
        "actor_rollout_ref.actor.optim.lr": 0.05,
        "data.val_files": folder / "prompts.txt",
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 1,
        "trainer.test_freq": 1,
    }
    local_trainer(local_config(tiny_settings(folder, **more))).fit()
    return folder / "run"
