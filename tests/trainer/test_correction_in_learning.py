"""Weights of a correction reach the update, and stale samples are called so."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from e2e_runs import metrics, run_here, settings
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.protocol import DataProto

from verl_omni.config import schema
from verl_omni.experimental.one_step_off_policy import main_ppo
from verl_omni.trainer.checks.preflight import check_start
from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.trainer.diffusion.experience import Experience
from verl_omni.trainer.diffusion.policy_gradient_trainer import PolicyGradientRayTrainer
from verl_omni.trainer.diffusion.zero_gradient import likely_cause
from verl_omni.utils.arrays import object_array
from verl_omni.workers.layout import Layout
from verl_omni.workers.losses import build_loss_function
from verl_omni.workers.rollout import engine_class

ROLLOUT, RECOMPUTED = torch.zeros(4, 2), torch.tensor([[0.0, 0.1], [0.2, -0.3], [5.0, 0.0], [-1.0, 0.5]])


def prepared(*overrides: str):
    schema.register()
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        return prepare_config(compose("diffusion_trainer", settings("run", *overrides)))


def learned(*overrides: str, version: int, ask: list | None = None) -> DataProto | None:
    """What `learn` sends to the workers, of samples that weights of this version drew; it is step 3 (2 are done). `ask`
    gets the metrics, and how often log-probabilities were recomputed."""
    config = OmegaConf.to_object(prepared("trainer.mode=one_step_off", *overrides))
    trainer = mock.Mock(spec=PolicyGradientRayTrainer, config=config, global_step=2)
    trainer.loss_function = build_loss_function(config.actor_rollout_ref.actor)
    trainer.actor_wg = SimpleNamespace(
        compute_log_prob=mock.Mock(side_effect=lambda data: DataProto.from_dict({"old_log_probs": RECOMPUTED.clone()})),
        update_actor=mock.Mock(),
    )
    trainer.layout = Layout()
    trainer.actor_wg.update_actor.return_value = [{}]
    batch = DataProto.from_dict(
        {
            "rollout_log_probs": ROLLOUT.clone(),
            "all_timesteps": torch.ones(4, 2),
            "sample_level_rewards": torch.tensor([0.0, 1.0, 0.5, 0.2]),
        },
        {"uid": object_array(["a"] * 4), "trajectory": object_array([None] * 4)},
    )
    experience = Experience(("e0",), version, batch, lambda: None)
    experience.scored = lambda timing: batch
    for name in ("_for_training", "_mini_batches", "_update_actor", "_correct"):
        setattr(trainer, name, getattr(PolicyGradientRayTrainer, name).__get__(trainer))
    _, metrics = PolicyGradientRayTrainer.learn(trainer, experience, {})
    if ask is not None:
        ask += [metrics, trainer.actor_wg.compute_log_prob.call_count]
    call = trainer.actor_wg.update_actor.call_args
    return call and call.args[0]


def test_weights_reach_the_update():
    sent = learned("algorithm.rollout_correction.rollout_is=step", version=1)
    torch.testing.assert_close(sent.batch["rollout_is_weights"], RECOMPUTED.exp().clamp(max=2.0))
    assert torch.equal(sent.batch["old_log_probs"], RECOMPUTED)
    assert torch.equal(sent.batch["rollout_log_probs"], ROLLOUT)
    assert sent.meta_info["stale"] is True


RS = "algorithm.rollout_correction.rollout_rs"


def test_rejected_steps_are_out_of_the_mean():
    sent = learned(f"{RS}=token_k2", f"{RS}_threshold=0.04", version=1)
    kept = RECOMPUTED**2 / 2 <= 0.04
    torch.testing.assert_close(sent.batch["share"], kept / kept.sum().double())
    assert "rollout_is_weights" not in sent.batch.keys() and 0 < kept.sum() < 8


def test_where_all_is_rejected_there_is_no_update():
    ask = []
    assert learned(f"{RS}=seq_max_k2", f"{RS}_threshold=1e-9", version=1, ask=ask) is None
    assert ask[0]["training/skipped_updates"] == 1 and "every step is rejected" in likely_cause(ask[0])


def test_bypassing_compares_with_the_rollout_and_rejects_only():
    """As verl documents it: weights are in the metrics, rejection counts, the ratio is to the policy that drew."""
    settings = ("bypass_mode=true", "rollout_is=sequence", "rollout_rs=seq_mean_k1", 'rollout_rs_threshold="0.5_2.0"')
    ask = []
    sent = learned(*(f"algorithm.rollout_correction.{one}" for one in settings), version=1, ask=ask)
    kept = (RECOMPUTED.mean(1).abs() <= math.log(2))[:, None].expand(4, 2)
    assert torch.equal(sent.batch["share"], kept / kept.sum().double()) and kept.sum() == 6
    assert torch.equal(sent.batch["old_log_probs"][kept], ROLLOUT[kept])
    assert torch.equal(sent.batch["old_log_probs"][~kept], RECOMPUTED[~kept])  # whose ratio cannot overflow
    assert "rollout_is_weights" not in sent.batch.keys() and ask[0]["rollout_corr/rollout_is_mean"] > 1
    assert ask[1] == 1


def test_bypassing_alone_recomputes_nothing():
    ask = []
    sent = learned("algorithm.rollout_correction.bypass_mode=true", version=1, ask=ask)
    assert ask[1] == 0 and torch.equal(sent.batch["old_log_probs"], ROLLOUT)


LOW = "actor_rollout_ref.actor.engine.dtype=bfloat16"
OFF = "trainer.mode=one_step_off"
IS, OLD = "algorithm.rollout_correction.rollout_is", "actor_rollout_ref.actor.old_log_probs"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([OFF], (None, None)),  # the same arithmetic: the loss's own ratios are to the weights that drew
        ([OFF, LOW], ("step", "recompute")),
        (["trainer.mode=fully_async", LOW], ("step", "recompute")),
        ([OFF, "trainer.device=cuda"], ("step", "recompute")),
        ([OFF, LOW, f"{IS}=sequence"], ("sequence", "recompute")),
        ([OFF, LOW, f"{OLD}=recompute"], (None, "recompute")),
        ([OFF, LOW, "algorithm.rollout_correction.bypass_mode=true"], (None, "rollout")),
        ([OFF, LOW, "trainer.max_staleness=0"], (None, None)),
        (["trainer.mode=separate", LOW], (None, None)),
        ([LOW], (None, None)),
        ([LOW, f"{IS}=token"], ("token", "recompute")),  # beside training, whose kernels round differently
        (["trainer.device=cuda", f"{IS}=token"], ("token", "recompute")),
    ],
)
def test_stale_samples_are_weighed_where_no_ratio_is_to_who_drew_them(overrides, expected):
    config = prepared(*overrides)
    found = (config.algorithm.rollout_correction.rollout_is, config.actor_rollout_ref.actor.old_log_probs)
    assert found == expected
    said = ["Stale samples are learned from without weights for their staleness"] * (f"{OLD}=recompute" in overrides)
    assert [line.partition(" (")[0] for line in check_start(config).notices] == said


@pytest.mark.parametrize(
    ("algorithm", "written"),
    [
        ("flow_grpo", ("rollout_is=token", "rollout_rs=token_k1", "rollout_rs_threshold=2.0")),
        (
            "flow_dppo",
            ("bypass_mode=true", "rollout_is=sequence", "rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.5_2.0"),
        ),
    ],
)
def test_verls_settings_run_as_written_beside_training(algorithm, written, tmp_path, monkeypatch, process_group):
    """In bfloat16 the rollout rounds differently from training, in the same process or not."""
    more = [f"actor_rollout_ref.model.algorithm={algorithm}", LOW, "trainer.total_training_steps=1"]
    arguments = settings(tmp_path / "run", *more, *(f"algorithm.rollout_correction.{one}" for one in written))
    run_here(arguments, tmp_path, monkeypatch)
    step = metrics(tmp_path / "run")[1]
    assert step["actor/grad_norm"] > 0 and step["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.1)
    assert 0 < step["rollout_corr/k3_kl"] < 0.1 and step["rollout_corr/rollout_rs_masked_fraction"] < 1
    source = "rollout" if "bypass_mode=true" in written else "recompute"
    assert step[f"actor/old_log_probs_from_{source}"] == 1


@pytest.mark.parametrize("name", ["diffusers", "vllm_omni"])
def test_an_engine_says_whether_it_computes_as_training_does(name):
    assert engine_class(name).same_arithmetic is (name == "diffusers")


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
