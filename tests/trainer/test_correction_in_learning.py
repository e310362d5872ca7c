"""Weights of a correction reach the update, and stale samples are called so."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from e2e_runs import settings
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.protocol import DataProto

from verl_omni.config import schema
from verl_omni.experimental.one_step_off_policy import main_ppo
from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.trainer.diffusion.experience import Experience
from verl_omni.trainer.diffusion.policy_gradient_trainer import PolicyGradientRayTrainer
from verl_omni.utils.arrays import object_array
from verl_omni.workers.losses import build_loss_function

ROLLOUT, RECOMPUTED = torch.zeros(4, 2), torch.tensor([[0.0, 0.1], [0.2, -0.3], [5.0, 0.0], [-1.0, 0.5]])


def learned(*overrides: str, version: int) -> DataProto:
    """What `learn` sends to the workers, of samples that weights of this version drew; it is step 3 (2 are done)."""
    schema.register()
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        config = prepare_config(compose("diffusion_trainer", settings("run", "trainer.mode=one_step_off", *overrides)))
    chosen = OmegaConf.to_object(config)
    trainer = mock.Mock(spec=PolicyGradientRayTrainer, config=config, settings=chosen, global_step=2)
    trainer.loss_function = build_loss_function(chosen.actor_rollout_ref.actor)
    trainer.actor_wg = SimpleNamespace(
        compute_log_prob=lambda data: DataProto.from_dict({"old_log_probs": RECOMPUTED}), update_actor=mock.Mock()
    )
    trainer.actor_wg.update_actor.return_value = [{}]
    batch = DataProto.from_dict(
        {
            "rollout_log_probs": ROLLOUT.clone(),
            "all_timesteps": torch.ones(4, 2),
            "sample_level_rewards": torch.tensor([0.0, 1.0, 0.5, 0.2]),
        },
        {"uid": object_array(["a"] * 4), "trajectory": object_array([None] * 4)},
    )
    trainer._scored.side_effect = lambda experience, timing: experience.batch
    for name in ("_for_training", "_mini_batches", "_update_actor"):
        setattr(trainer, name, getattr(PolicyGradientRayTrainer, name).__get__(trainer))
    PolicyGradientRayTrainer.learn(trainer, Experience(("e0",), version, batch, lambda: None), {})
    return trainer.actor_wg.update_actor.call_args.args[0]


def test_weights_reach_the_update():
    sent = learned("algorithm.rollout_correction.rollout_is=step", version=1)
    torch.testing.assert_close(sent.batch["rollout_is_weights"], RECOMPUTED.exp().clamp(max=2.0))
    assert torch.equal(sent.batch["old_log_probs"], RECOMPUTED)
    assert torch.equal(sent.batch["rollout_log_probs"], ROLLOUT)
    assert sent.meta_info["stale"] is True


def test_rejected_steps_have_no_weight():
    rs = ("algorithm.rollout_correction.rollout_rs=step_k2", "algorithm.rollout_correction.rollout_rs_threshold=0.04")
    sent = learned(*rs, version=1)
    assert torch.equal(sent.batch["rollout_is_weights"], (RECOMPUTED**2 / 2 <= 0.04).float())


@pytest.mark.parametrize("version", [1, 2])
def test_without_a_correction_the_rollouts_own_are_sent(version):
    sent = learned(version=version)
    assert torch.equal(sent.batch["old_log_probs"], ROLLOUT) and "rollout_is_weights" not in sent.batch.keys()
    assert sent.meta_info["stale"] is (version != 2)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ([], ["--config-dir", "HERE", "--config-name", main_ppo.NAME, "trainer.mode=one_step_off"]),
        (["--config-path=config", "--config-name=x.yaml", "a=1"],
         ["--config-dir", "HERE", "--config-name=x.yaml", "a=1", "trainer.mode=one_step_off"]),
        (["--config-path", "config", "trainer.mode=separate"],
         ["--config-dir", "HERE", "--config-name", main_ppo.NAME, "trainer.mode=separate"]),
        (["--config-dir", "D", "--config-name", "R"],
         ["--config-dir", "D", "--config-name", "R", "trainer.mode=one_step_off"]),
        (["--config-path=/mine"],
         ["--config-dir", "HERE", "--config-name", main_ppo.NAME, "--config-path=/mine", "trainer.mode=one_step_off"]),
    ],
)  # fmt: skip
def test_the_documented_command_finds_its_recipe_and_keeps_its_mode(typed, meant):
    here = [str(main_ppo.CONFIG) if word == "HERE" else word for word in meant]
    assert main_ppo.with_config(typed) == here
