"""Settings that no run can use are refused in one line, before a worker starts: out of range, or without effect."""

import dataclasses

import pytest
import torch
from refusals import prepared, refused

from verl_omni.algorithms.flow_grpo import FlowGRPOLoss
from verl_omni.algorithms.registry import _ESTIMATORS, _LOSSES
from verl_omni.config import schema
from verl_omni.config.knob import walk

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.checkpoint_engine"
ASYNC = ["trainer.mode=fully_async"]
OFF, IS = ["trainer.mode=one_step_off"], "algorithm.rollout_correction.rollout_is=step"


# ---- ranges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{ACTOR}.diffusion_loss.clip_ratio=-1", "above 0"),
        (f"{ACTOR}.diffusion_loss.adv_clip_max=0", "above 0"),
        (f"{ACTOR}.diffusion_loss.adv_clip_max=-5", "above 0"),
        (f"{ACTOR}.kl_loss_coef=-0.1", "0 or more"),
        ("algorithm.filter_groups.max_num_gen_batches=0", "2 or more"),
        (f"{ACTOR}.optim.clip_grad=-1", "0 or more"),
        (f"{ACTOR}.optim.lr=-1", "above 0"),
        (f"{ACTOR}.optim.lr=nan", "above 0"),
        (f"{ACTOR}.optim.lr=inf", "above 0"),
        (f"{ACTOR}.optim.betas=[0.9,1.0]", "0 or more, below 1"),
        (f"{ACTOR}.optim.eps=-1e-8", "above 0"),
        (f"{ACTOR}.optim.weight_decay=nan", "0 or more"),
        (f"{ACTOR}.optim.lr_warmup_steps=-1", "0 or more"),
        (f"{ACTOR}.engine.seed=-1", "0 or more, at most 4294967295"),
        (f"{ACTOR}.fsdp_config.fsdp_size=0", "-1 or 1 or more"),
        (f"{MODEL}.lora_rank=-4", "0 or more"),
        (f"{MODEL}.lora_alpha=0", "1 or more"),
        (f"{ROLLOUT}.algo.noise_level=-0.7", "0 or more"),
        (f"{ROLLOUT}.seed=-1", "0 or more"),
        (f"{ROLLOUT}.val_kwargs.n=0", "1 or more"),
        (f"{ROLLOUT}.val_kwargs.noise_level=-1", "0 or more"),
        (f"{ROLLOUT}.val_kwargs.pipeline.max_sequence_length=0", "1 or more"),
        ("data.val_batch_size=0", "1 or more"),
        ("data.seed=-1", "0 or more"),
        ("reward.batch_size=0", "1 or more"),
        ("trainer.seed=-1", "0 or more"),
        ("trainer.total_epochs=0", "1 or more"),
        ("trainer.log_val_images=-2", "-1 or more"),
        ("trainer.save_freq=-2", "-1 or more"),
        ("trainer.test_freq=-2", "-1 or more"),
        ("trainer.profile_step=0", "1 or more"),
    ],
)  # fmt: skip
def test_a_number_outside_its_range(override, expected):
    key = override.split("=")[0]
    line = refused(override)
    assert line.startswith(f"{key}=") and line.split(": expected ")[1].startswith(expected)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        (f"{MODEL}.load_format=dumy", "dummy"),
        (f"{MODEL}.lora_init=gausian", "gaussian"),
        (f"{ACTOR}.old_log_probs=rolout", "rollout"),
        ("algorithm.adv_mode=continous", "continuous"),
        ("algorithm.old_policy_decay_schedule=coppy", "copy"),
        ("reward.reward_manager.source=registry", "register"),
    ],
)
def test_a_name_outside_its_choices(override, meant):
    assert f'unknown {override.split("=")[0]} "' in refused(override) and f'did you mean "{meant}"' in refused(override)


@pytest.mark.parametrize("name", ["LBFGS", "Muon", "Rprop", "SparseAdam", "Optimizer"])
def test_an_optimizer_that_could_not_train_here(name):
    assert f'{ACTOR}.optim.optimizer "{name}"' in refused(f"{ACTOR}.optim.optimizer={name}")


def test_every_number_and_every_name_says_what_it_may_be():
    """Without a range are only switches, paths, free text, names that can be registered, and open dicts."""
    free = {
        "data.train_files", "data.val_files", "data.prompt_key", f"{MODEL}.revision", "recipe", "ray.address",
        "ray.timeline_json_file", "ray.env_vars",
        "trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir", "trainer.resume_from_path",
        "trainer.replay", "trainer.callbacks",
        "reward.custom_reward_function.path", "reward.custom_reward_function.name", "reward.reward_manager.name",
        "reward.validation.custom_reward_function.path", "reward.validation.custom_reward_function.name",
        "reward.validation.scorers",
        "reward.reward_manager.module.path", "reward.reward_model.model_path", "reward.scorers",
        "reward.reward_model.command",
        f"{MODEL}.path", f"{MODEL}.architecture", f"{MODEL}.external_lib", f"{MODEL}.tokenizer_path",
        f"{MODEL}.transformer_subfolder", f"{MODEL}.config_path", f"{MODEL}.lora_path", f"{MODEL}.target_modules",
        f"{MODEL}.pipeline", f"{MODEL}.algo", f"{MODEL}.algorithm", f"{ACTOR}.diffusion_loss.loss_mode",
        "algorithm.adv_estimator", f"{ROLLOUT}.algo.sde_type", f"{ROLLOUT}.val_kwargs.sde_type",
        f"{ROLLOUT}.pipeline.negative_prompt", f"{ROLLOUT}.val_kwargs.pipeline.negative_prompt",
        f"{ROLLOUT}.agent.default_agent_loop", f"{ROLLOUT}.checkpoint_engine.backend", f"{ROLLOUT}.http.host",
        f"{ROLLOUT}.http.token_file",
        "algorithm.rollout_correction.rollout_rs", "algorithm.filter_groups.metric", f"{ACTOR}.teacher.path",
        f"{ACTOR}.engine.fp8_modules", "actor_rollout_ref.ref.path",
        *(f"actor_rollout_ref.rewriter.{name}" for name in ("path", "system", "template", "format", "format_reward")),
    }  # fmt: skip
    types = {name: kind for name, kind in field_types(schema.DiffusionTrainerConfig)}
    without = {k.name for k in walk(schema.DiffusionTrainerConfig) if not k.range.bounds() and k.range.choices is None}
    switches = {name for name, kind in types.items() if "bool" in kind}
    open_dicts = {name for name, kind in types.items() if "dict" in kind}
    assert without - switches - open_dicts == free


def field_types(cls: type, prefix: str = ""):
    for field in dataclasses.fields(cls):
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default
        if dataclasses.is_dataclass(default):
            yield from field_types(type(default), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", str(field.type)


@pytest.mark.parametrize("name", ["dtype", "model_dtype"])
def test_gradients_do_not_fit_into_float16(name):
    """2^-25 is a usual gradient of one of many pairs: float16 makes it 0, bfloat16 does not."""
    small = torch.tensor(2.0**-25)
    assert small.to(torch.float16) == 0 and small.to(torch.bfloat16) == small
    line = refused(f"{ACTOR}.engine.{name}=float16")
    assert f"{name}=float16: small gradients become 0" in line and "known: float32, bfloat16" in line


def test_weights_of_rewards_are_numbers():
    weights = ["algorithm.adv_estimator=gdpo", "++algorithm.reward_weights={score: nan}"]
    assert "algorithm.reward_weights.score=nan: expected a finite number" in refused(*weights)


def of_two_rewards(index, sample_level_reward_components, reward_weights):
    """An estimator of a user's own."""


def of_one_reward(sample_level_rewards, index):
    """Likewise."""


@pytest.fixture
def own(monkeypatch):
    """An estimator for several rewards, one for one, and a loss that reads all that the model gives."""

    class Own(FlowGRPOLoss):
        required_model_output_keys = ("log_probs", "prev_sample_mean", "std_dev_t", "kl_std")

        @classmethod
        def compute_loss(cls, *, log_prob, advantages, config):
            """Without the weights of a correction."""

    registries = {_ESTIMATORS: {"of_two": of_two_rewards, "of_one": of_one_reward}, _LOSSES: {"own": Own}}
    for registry, entries in registries.items():
        registry.names()  # the built-in ones come first
        added = {name: (thing, "this test", ("this test", name)) for name, thing in entries.items()}
        monkeypatch.setattr(registry, "_entries", {**registry._entries, **added})


SCORERS = "reward.scorers=[{name: ocr, weight: 2}, {name: jpeg_compressibility, weight: -0.5}]"


def test_an_estimator_of_ones_own_has_the_weights_of_several_rewards(own):
    weights = {"ocr": 2.0, "jpeg_compressibility": -0.5}
    for estimator in ("of_two", "gdpo"):
        assert prepared(f"algorithm.adv_estimator={estimator}", SCORERS).algorithm.reward_weights == weights
        line = refused(f"algorithm.adv_estimator={estimator}", SCORERS.replace("2}", "2, data_sources: [a]}"))
        assert f"algorithm.adv_estimator={estimator} compares each reward" in line
    assert prepared("algorithm.adv_estimator=of_one", SCORERS).algorithm.reward_weights == {}
    line = refused("algorithm.adv_estimator=of_one", "++algorithm.reward_weights={score: 1}")
    assert "has no effect with algorithm.adv_estimator=of_one, which takes one reward" in line


def test_a_loss_may_ask_for_all_that_the_model_gives(own):
    loss = f"{ACTOR}.diffusion_loss.loss_mode=own"
    assert prepared(loss)
    assert "Own.compute_loss takes no rollout_is_weights" in refused(loss, *OFF, IS)


# ---- what would change nothing -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.rollout_correction.bypass_mode=true"], "in float32 as training does: leave it out"),
        (["algorithm.rollout_correction.rollout_is_threshold=3"], "set algorithm.rollout_correction.rollout_is"),
        (["trainer.max_staleness=0"], "max_staleness=0 has no effect with trainer.mode=colocated"),
        (["trainer.max_staleness=0"], "or set trainer.mode=one_step_off or fully_async"),
        ([*OFF, "trainer.max_staleness=2"], "draws one step ahead; expected 0 or 1, or set trainer.mode=fully_async"),
        ([*OFF, "trainer.stale_groups=keep"], "stale_groups=keep has no effect with trainer.mode=one_step_off"),
        ([*OFF, "trainer.replay=run"], "replay=run has no effect with trainer.mode=one_step_off"),
        ([*ASYNC, "trainer.max_staleness=0", "trainer.stale_groups=keep"], "no effect with trainer.max_staleness=0"),
        ([*ASYNC, f"{ACTOR}.old_log_probs=train"], "which trainer.mode=fully_async does not have"),
        (["rollout.n_gpus_per_node=2"], "n_gpus_per_node=2 is for rollout servers: set trainer.mode=separate"),
        ([*OFF, "algorithm.rollout_correction.rollout_rs_threshold=2"], "set algorithm.rollout_correction.rollout_rs"),
        ([*OFF, f"{ACTOR}.old_log_probs=train"], "takes the weights that learn for those that drew"),
        ([*OFF, IS, f"{ACTOR}.old_log_probs=rollout"], "go with old_log_probs=recompute"),
        ([*OFF, IS, f"{MODEL}.algorithm=dpo"], "is for policy gradient"),
        ([f"{ROLLOUT}.server_restarts=1"], "server_restarts=1 has no effect with actor_rollout_ref.hybrid_engine=true"),
        ([f"{ENGINE}.backend=gloo"], "backend=gloo has no effect with actor_rollout_ref.hybrid_engine=true"),
        ([*OFF, f"{ENGINE}.update_weights_bucket_megabytes=9"], f"set {ENGINE}.backend too"),
        ([*OFF, f"{ENGINE}.backend=nccl", "trainer.device=cpu"], "backend=nccl needs GPUs: choose gloo"),
        ([*OFF, f"{ENGINE}.backend=ipc", "trainer.device=cuda"], "have GPUs of their own: choose gloo or nccl"),
        ([*OFF, f"{ENGINE}.backend=ipc", f"{ROLLOUT}.n_gpus_per_node=2"], "of 2 rollout servers 1 have a training"),
        ([*OFF, f"{ENGINE}.backend=glo"], "Checkpoint engine glo not registered, registered backends: ['gloo'"),
        ([*OFF, f"{ENGINE}.backend=gloo", f"{ROLLOUT}.server_restarts=1"], "has no effect with"),
        ([*OFF, f"{ENGINE}.backend=naive"], "backend=naive brings no whole weights to servers: choose gloo"),
        ([*OFF, f"{ENGINE}.backend=gloo", f"++{ENGINE}.engine_kwargs.a=1"], "unexpected keyword argument 'a'"),
        ([*OFF, f"{ROLLOUT}.http.port=8200", "rollout.nnodes=2"], "of 2 nodes, nobody reaches the servers of the"),
        (
            [*ASYNC, "trainer.stale_groups=keep", f"{MODEL}.algorithm=diffusion_nft"],
            "diffusion_nft compares with the policy that drew the samples, and only those of the last",
        ),
        (["reward.pairwise.by=score", f"{ROLLOUT}.n=1"], "needs 2 images that are compared, and there are 1"),
        (["reward.pairwise.by=score", "reward.pairwise.opponents=16"], "needs 17 images that are compared"),
        (["reward.pairwise.by=pair", "data.val_files=x.parquet"], "validation has a single one"),
        (["reward.pairwise.by=group", "data.val_files=x.parquet"], "shows a reward the images of a group"),
        (["reward.pairwise.by=group", "reward.pairwise.opponents=2"], "has no effect with reward.pairwise.by=group"),
        (["reward.pairwise.by=score", "reward.reward_manager.name=mine"], "has no effect with a reward manager"),
        (["reward.pairwise.opponents=2"], "has no effect with reward.pairwise.by=null"),
        ([*ASYNC, "trainer.stale_groups=keep", f"{MODEL}.algorithm=awm"], "awm compares with the policy that drew"),
        ([*OFF, f"{ACTOR}.engine.fold_lora=true", f"{MODEL}.lora_rank=4"], "does nothing beside rollout servers"),
        ([*OFF, "rollout.nnodes=2", f"{ROLLOUT}.nnodes=3"], "are one setting"),
        ([f"{ROLLOUT}.http.port=8200"], "http.port=8200 has no effect with actor_rollout_ref.hybrid_engine=true"),
        ([*OFF, f"{ROLLOUT}.http.host=0.0.0.0"], f"has no effect with {ROLLOUT}.http.port=null"),
        ([*OFF, f"{ROLLOUT}.http.token_file=token"], f"or set {ROLLOUT}.http.port too"),
        ([*OFF, f"{ROLLOUT}.http.max_pixels=99"], f"or set {ROLLOUT}.http.port too"),
        ([*OFF, f"{ROLLOUT}.http.max_images=9"], f"or set {ROLLOUT}.http.port too"),
        (["reward.reward_model.nnodes=2"], "has no effect with reward.reward_model.enable=false"),
        (["algorithm.adv_mode=binary"], "adv_mode=binary has no effect with algorithm.trainer_type=policy_gradient"),
        (["algorithm.old_policy_decay=0.5"], "leave it out, or set algorithm.trainer_type=direct_preference"),
        ([f"{MODEL}.algorithm=awm", f"{ROLLOUT}.algo.sde_window_size=2"], "sde_window_size=2 has no effect with"),
        ([f"{ACTOR}.kl_loss_coef=0.1"], f"kl_loss_coef=0.1 has no effect with {ACTOR}.use_kl_loss=false"),
        ([f"{MODEL}.target_modules=[to_q]"], f"or set {MODEL}.lora_rank too"),
        (["trainer.resume_from_path=x/global_step_1"], "resume_from_path=x/global_step_1 has no effect"),
        ([f"{MODEL}.algorithm=dpo", "algorithm.old_policy_decay=0.5"], 'algorithm "dpo" follows no old policy'),
        ([f"{MODEL}.algorithm=awm", "algorithm.old_policy_update_interval=2"], "follows no old policy with these"),
        ([f"{MODEL}.algorithm=dpo", "algorithm.adv_mode=binary"], 'loss "dpo" reads no advantages'),
        ([f"{MODEL}.algo={{noise_level: 1}}"], f'Did you mean "{ROLLOUT}.algo.noise_level"?'),
        (["++algorithm.reward_weights={score: 1}"], "which takes one reward: set algorithm.adv_estimator=gdpo"),
        (["reward.reward_manager.module.path=mine.py"], "has no effect with reward.reward_manager.source=register"),
    ],
)
def test_a_setting_without_effect(overrides, said):
    assert said in refused(*overrides)


def test_defaults_of_an_algorithm_are_no_settings_of_the_user():
    """`awm` has an old policy of its own, which is no mistake; nor is the default itself, typed out."""
    assert prepared(f"{MODEL}.algorithm=awm").algorithm.old_policy_decay_schedule == "linear_to_0_3"
    assert prepared("algorithm.adv_mode=continuous", f"{ACTOR}.kl_loss_coef=0.04", f"{MODEL}.lora_alpha=64")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{ROLLOUT}.algo.noise_level=0"], "sde_type=sde with noise_level=0.0 adds no noise"),
        ([f"{ROLLOUT}.algo.sde_type=ode"], "sde_type to one of cps, dance_sde,"),
        (
            [f"{MODEL}.algorithm=grpo_guard", f"{ROLLOUT}.algo.sde_type=ode"],
            "sde_type=ode with noise_level=0.7 adds no",
        ),
        (
            [f"{MODEL}.algorithm=grpo_guard", f"{ROLLOUT}.algo.sde_type=cps"],
            'loss "grpo_guard" is for steps with a Gaussian log-probability, which sde_type=cps does not have',
        ),
        (
            [f"{MODEL}.algorithm=tempflow_grpo", f"{ROLLOUT}.algo.sde_type=cps"],
            f"set {ROLLOUT}.algo.sde_type to one of dance_sde,",
        ),
        ([f"{ROLLOUT}.algo.sde_type=cps", f"{ROLLOUT}.algo.noise_level=2"], "noise_level (sde_type=cps)=2.0: expected"),
        ([f"{ROLLOUT}.val_kwargs.noise_level=2", f"{ROLLOUT}.val_kwargs.sde_type=cps"], "0 or more, at most 1"),
        ([f"{ROLLOUT}.val_kwargs.noise_level=1", f"{ROLLOUT}.val_kwargs.sde_type=odee"], 'unknown sde_type "odee"'),
        ([f"{ROLLOUT}.val_kwargs.sde_type=cps"], f"has no effect with {ROLLOUT}.val_kwargs.noise_level=0.0"),
        ([f"{MODEL}.algorithm=dpo", f"{ROLLOUT}.val_kwargs.noise_level=1"], "has no effect with sde_type=ode"),
    ],
)
def test_a_policy_gradient_needs_noise(overrides, said):
    assert said in refused(*overrides)


@pytest.mark.parametrize(
    ("algorithm", "setting", "said"),
    [
        ("diffusion_nft", "beta=0", "extra.beta=0: expected above 0"),
        ("diffusion_nft", "kl_beta=-1", "extra.kl_beta=-1: expected 0 or more"),
        ("dpo", "beta=much", "extra.beta=much: expected a number, such as 2000.0"),
        ("awm", "weighting=hubber", 'did you mean "huber"'),
        ("flow_dppo", "kl_mask_threshold=0", "expected above 0"),
    ],
)
def test_a_setting_of_one_loss(algorithm, setting, said):
    assert said in refused(f"{MODEL}.algorithm={algorithm}", f"+{ACTOR}.diffusion_loss.extra.{setting}")


@pytest.mark.parametrize("algorithm", ["diffusion_nft", "flow_grpo"])
def test_advantages_that_are_clamped_to_nothing(algorithm):
    assert "adv_clip_max=0.0: expected above 0" in refused(
        f"{MODEL}.algorithm={algorithm}", f"{ACTOR}.diffusion_loss.adv_clip_max=0"
    )


@pytest.mark.parametrize(
    ("architecture", "knob", "said"),
    [
        (
            "QwenImagePipeline",
            "guidance_scale=4",
            "has no effect on QwenImagePipeline: it has true_cfg_scale; leave it",
        ),
        ("QwenImagePipeline", "num_frames=5", "num_frames=5 has no effect"),
        ("StableDiffusion3Pipeline", "true_cfg_scale=4", "it has guidance_scale"),
        ("Flux2Pipeline", "true_cfg_scale=4", "it has guidance_scale"),
        ("WanPipeline", "guidance_scale_2=4", "it has guidance_scale, num_frames"),
    ],
)
def test_a_pipeline_knob_that_the_architecture_does_not_have(architecture, knob, said):
    assert said in refused(f"{ROLLOUT}.pipeline.{knob}", architecture=architecture)
    assert said in refused(f"{ROLLOUT}.val_kwargs.pipeline.{knob}", architecture=architecture)


@pytest.mark.parametrize(
    ("architecture", "override", "said"),
    [
        ("LongCatAudioDiTPipeline", f"{ROLLOUT}.val_kwargs.n=1", "pipeline.height=32 has no effect on LongCatAudioDiT"),
        ("QwenImagePipeline", f"{ROLLOUT}.algo.audio_share=0.5", "is for a video with sound, and QwenImagePipeline"),
        ("QwenImagePipeline", f"{ROLLOUT}.pipeline.audio_duration_s=2", "audio_duration_s=2.0 has no effect"),
        ("LongCatAudioDiTPipeline", f"{ROLLOUT}.pipeline.audio_duration_s=31", "LongCat-AudioDiT makes at most 30 sec"),
        ("LTX2Pipeline", f"{ROLLOUT}.algo.audio_share=1.5", "audio_share=1.5: expected 0 or more, at most 1"),
        ("LTX2Pipeline", f"{ROLLOUT}.pipeline.num_frames=4", "num_frames=4: LTX-2 makes 2k + 1 frames, such as 5"),
        ("WanImageToVideoPipeline", f"{ROLLOUT}.pipeline.num_frames=1", "num_frames=1: the first frame is given"),
        ("MiniMaxH3ModularPipeline", f"{ROLLOUT}.pipeline.num_frames=23", "makes 17k + 5 frames, such as 22"),
        ("MiniMaxH3ModularPipeline", f"{ROLLOUT}.pipeline.num_frames=5", "makes 17k + 5 frames, such as 22"),
        ("MiniMaxH3ModularPipeline", f"{ROLLOUT}.pipeline.negative_prompt=blurry", "MiniMax-H3 reads none; leave it"),
        ("MiniMaxH3ModularPipeline", f"{ROLLOUT}.pipeline.guidance_scale=4", "guidance_scale=4.0 has no effect"),
        ("GlmImagePipeline", f"{ROLLOUT}.pipeline.negative_prompt=blurry", "GLM-Image reads none; leave it out"),
        ("ChromaPipeline", f"{MODEL}.enable_gradient_checkpointing=true", "Chroma leaves the mask of the prompt out"),
    ],
)
def test_what_models_of_sound_and_given_frames_cannot_do(architecture, override, said):
    assert said in refused(override, architecture=architecture)


@pytest.mark.parametrize("key", ["trainer.typo", "typo", f"{ROLLOUT}.algo.noise", f"{MODEL}.extras"])
def test_a_key_that_nothing_reads(key):
    """Hydra's `+` adds whatever it is told; recipes go through the same check."""
    assert f'unknown config key "{key}"' in refused(f"+{key}=1")


# ---- who may look at the policy ------------------------------------------------------------------------

PORT = [*OFF, f"{ROLLOUT}.http.port=65535"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*OFF, f"{ROLLOUT}.http.port=65536"], "http.port=65536: expected 0 or more, at most 65535"),
        ([*PORT, "rollout.n_gpus_per_node=2"], "http.port=65535: the last rollout server would listen on 65536"),
        ([*PORT, f"{ROLLOUT}.http.host=0.0.0.0"], "http.host=0.0.0.0 lets other machines in: name a file with a token"),
        ([*PORT, f"{ROLLOUT}.http.host=my.host"], "http.host=my.host lets other machines in: name a file with a token"),
        ([*PORT, f"{ROLLOUT}.http.token_file=/no/such"], 'token file "/no/such" cannot be read: No such file'),
        ([*PORT, f"{ROLLOUT}.http.token_file={{empty}}"], "holds no token: expected one word"),
        ([*PORT, f"{ROLLOUT}.http.max_images=0"], "http.max_images=0: expected 1 or more"),
    ],
)
def test_who_may_look_at_the_policy(overrides, said, tmp_path):
    (tmp_path / "empty").write_text("\n")
    assert said in refused(*[override.format(empty=tmp_path / "empty") for override in overrides])


def test_a_model_that_needs_images_cannot_be_asked_without(tmp_path):
    name = "QwenImageEditPlusPipeline"
    assert f"{name} draws from images" in refused(*PORT, architecture=name)


def test_any_port_with_or_without_a_token_passes(tmp_path):
    (tmp_path / "token").write_text("sesame\n")
    http = [f"{ROLLOUT}.http.{one}" for one in ("port=0", "host=0.0.0.0", f"token_file={tmp_path}/token")]
    assert prepared(*OFF, *http).actor_rollout_ref.rollout.http.port == 0
    assert prepared(*OFF, http[0], f"{ROLLOUT}.http.host='::1'", f"{ROLLOUT}.http.max_images=9")
