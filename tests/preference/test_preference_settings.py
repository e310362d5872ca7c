"""Settings that direct preference cannot train with are refused before a worker starts; one flag selects the rest."""

import pytest
from composed import composed
from tiny_models import tiny_checkpoint

from verl_omni.trainer.checks.preparation import prepare_config

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def prepared(algorithm: str, *overrides: str):
    given = [
        f"actor_rollout_ref.model.path={tiny_checkpoint()}",
        f"actor_rollout_ref.model.algorithm={algorithm}",
        f"{ROLLOUT}.pipeline.height=32",
        f"{ROLLOUT}.pipeline.width=32",
        f"{ROLLOUT}.pipeline.num_inference_steps=4",
        "data.train_files=prompts.parquet",
        *overrides,
    ]
    return prepare_config(composed(*given))


@pytest.mark.parametrize(
    ("algorithm", "schedule", "paired"),
    [
        ("dpo", "copy", True),
        ("diffusion_nft", "copy", False),
        ("awm", "linear_to_0_3", False),
        ("dgpo", "constant_0_9", False),
    ],
)
def test_one_flag_selects_trainer_sampler_and_paces(algorithm, schedule, paired):
    config = prepared(algorithm)
    assert config.algorithm.trainer_type == "direct_preference"
    assert (config.actor_rollout_ref.rollout.algo.sde_type, config.actor_rollout_ref.rollout.algo.noise_level) == (
        "ode",
        0,
    )
    assert config.algorithm.old_policy_decay_schedule == schedule
    assert config.algorithm.paired_preference == paired
    assert (config.algorithm.timestep_distribution, config.algorithm.timestep_fraction) == ("uniform", 1.0)
    assert prepared(algorithm, "algorithm.timestep_fraction=0.5").algorithm.timestep_fraction == 0.5


@pytest.mark.parametrize(
    ("algorithm", "overrides"), [("diffusion_nft", []), ("awm", [f"+{ACTOR}.diffusion_loss.extra.ema_kl_beta=0.1"])]
)
def test_the_pace_of_an_old_policy_can_be_chosen_where_there_is_one(algorithm, overrides):
    given = prepared(algorithm, "algorithm.old_policy_decay_schedule=linear_to_0_5", *overrides)
    assert given.algorithm.old_policy_decay_schedule == "linear_to_0_5"


EMA = f"+{ACTOR}.diffusion_loss.extra."
ONE_UPDATE = ("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4")


@pytest.mark.parametrize(
    ("algorithm", "average", "pace"),
    [
        ("dgpo", "anchor=ema", "old_policy_decay_schedule=copy"),
        ("dgpo", "anchor=ema", "old_policy_decay=0.0"),
        ("awm", "ema_kl_beta=0.1", "old_policy_decay_schedule=copy"),
    ],
)
def test_an_average_that_would_be_the_policy_itself_is_refused(algorithm, average, pace):
    with pytest.raises(ValueError, match=f"algorithm.{pace}: the moving average .* would be the policy itself"):
        prepared(algorithm, f"{EMA}{average}", f"algorithm.{pace}", *ONE_UPDATE)
    prepared(algorithm, f"{EMA}{average}", *ONE_UPDATE)
    for more in ("algorithm.old_policy_update_interval=2", f"{ACTOR}.ppo_epochs=2"):  # then it is some steps behind
        prepared(algorithm, f"{EMA}{average}", f"algorithm.{pace}", *ONE_UPDATE, more)


@pytest.mark.parametrize(
    ("algorithm", "override", "message"),
    [
        ("diffusion_nft", f"{ROLLOUT}.pipeline.true_cfg_scale=4", "trains without classifier-free guidance"),
        ("dpo", f"{ACTOR}.use_kl_loss=true", "use_kl_loss=true is a KL between denoising steps"),
        ("dpo", f"{ROLLOUT}.algo.noise_level=0.7", "noise_level=0.7: direct preference samples with the ODE"),
        ("dpo", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", "this loss compares 2 images at a time"),
        ("dpo", f"{ROLLOUT}.n=1", "a group of one image has nothing to compare with"),
        ("awm", "algorithm.timestep_distribution=normal", 'did you mean "logit_normal"'),
        ("awm", "algorithm.timesteps_per_sample=0", "timesteps_per_sample=0: expected 1 or more"),
        ("awm", "algorithm.timestep_fraction=1.5", "timestep_fraction=1.5: expected above 0, at most 1"),
        ("diffusion_nft", "algorithm.old_policy_decay_schedule=linear", "old_policy_decay_schedule"),
        ("diffusion_nft", "algorithm.old_policy_decay=2", "expected 0 or more, at most 1"),
        ("diffusion_nft", "algorithm.old_policy_update_interval=0", "old_policy_update_interval=0"),
        ("diffusion_nft", "algorithm.adv_mode=positiv", "adv_mode"),
        ("diffusion_nft", "algorithm.trainer_type=policy_gradient", "gives no velocity, which loss .* needs"),
        ("flow_grpo", "algorithm.trainer_type=direct_preference", "gives no log_probs, which loss .* needs"),
        ("flow_grpo", "algorithm.sample_source=offline", "trains on its own rollouts"),
    ],
)
def test_what_cannot_train_is_said_in_one_line(algorithm, override, message):
    with pytest.raises(ValueError, match=message) as error:
        prepared(algorithm, override)
    assert "\n" not in str(error.value)


def test_more_noise_levels_than_the_rollout_has_steps():
    with pytest.raises(ValueError, match="5 different noise levels of a rollout of 4 steps"):
        prepared("awm", "algorithm.timestep_distribution=rollout", "algorithm.timesteps_per_sample=5")


def test_pairs_of_images_train_no_model_of_videos():
    model = f"actor_rollout_ref.model.path={tiny_checkpoint('WanPipeline')}"
    with pytest.raises(ValueError, match="makes video, and cached pairs are of images: train it with .*=online"):
        prepared("dpo", "algorithm.sample_source=offline", model, f"{ROLLOUT}.pipeline.num_frames=5")


def test_offline_training_has_no_image_validation():
    with pytest.raises(ValueError, match="starts no rollout engine, so that nothing can draw validation images"):
        prepared("dpo", "algorithm.sample_source=offline", "data.val_files=prompts.parquet")
