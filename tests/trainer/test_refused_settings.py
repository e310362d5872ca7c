"""Settings that no run can use are refused in one line, before a worker starts: out of range, or without effect."""

import dataclasses
import importlib.util
import json
import time

import pytest
import torch
from refusals import prepared, refused
from safetensors.torch import save_file
from tiny_models import tiny_checkpoint

from verl_omni.algorithms.flow_grpo import FlowGRPOLoss
from verl_omni.algorithms.registry import _ESTIMATORS, _LOSSES
from verl_omni.config import DiffusionActorConfig, DiffusionModelConfig, FSDPConfig, VeOmniConfig, schema
from verl_omni.config.actor import OPTIMIZERS
from verl_omni.config.knob import walk
from verl_omni.trainer.checks.workers import check_training_engine, empty_modules
from verl_omni.workers import rollout
from verl_omni.workers.rollout.batched import BatchedRollout
from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout
from verl_omni.workers.rollout.server import RolloutServer

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


def test_eight_bits_where_no_layer_is_wide_enough():
    line = refused(LORA, INT8, architecture="ZImagePipeline")
    assert "base_precision=int8 is for layers whose inputs are multiples of 64, and none of this model's" in line


def test_lora_where_diffusers_has_none():
    sized = [f"{ROLLOUT}.pipeline.{name}=512" for name in ("height", "width")]
    line = refused(f"{MODEL}.lora_rank=4", *sized, architecture="LongCatAudioDiTPipeline")
    assert "diffusers' LongCatAudioDiTTransformer takes no LoRA; train all its weights, lora_rank=0" in line


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


# ---- what only a worker would find ---------------------------------------------------------------------

ULYSSES = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
LORA, INT8 = f"{MODEL}.lora_rank=4", f"{MODEL}.base_precision=int8"
BLOCKS, TWO_RANKS = f"{ROLLOUT}.gather=blocks", "trainer.n_gpus_per_node=2"
TOGETHER = f"{ROLLOUT}.share_samples=true"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{ACTOR}.fsdp_config.fsdp_size=3", "trainer.n_gpus_per_node=4"], "fsdp_size=3 does not divide the 4 ranks"),
        ([f"{ULYSSES}=2"], "ulysses_sequence_parallel_size=2 does not divide the 1 ranks that share the weights"),
        ([f"{ULYSSES}=3", "trainer.n_gpus_per_node=3"], "does not divide the 2 attention heads of QwenImageTransf"),
        (
            [f"{ULYSSES}=2", "trainer.n_gpus_per_node=2", f"{ACTOR}.engine.use_torch_compile=true"],
            "use_torch_compile=true does not go with actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel",
        ),
        ([f"{ACTOR}.engine.fold_lora=true"], "fold_lora=true does nothing without LoRA"),
        ([f"{ACTOR}.engine.compile_ahead=true", TWO_RANKS, f"{ULYSSES}=2"], "does nothing where ranks share samples"),
        (
            [f"{ACTOR}.engine.compile_ahead=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=auto"],
            "does nothing with ppo_micro_batch_size_per_gpu=auto, which is found after the first rollout",
        ),
        ([f"{ACTOR}.engine.compile_ahead=true", "trainer.device=cpu"], "compile_ahead=true does nothing on a CPU"),
        (
            [f"{ACTOR}.engine.compile_ahead=true", f"{ACTOR}.engine.use_torch_compile=false"],
            "compile_ahead=true does nothing without compiled blocks (use_torch_compile=false)",
        ),
        (
            [f"{ACTOR}.engine.fold_lora=true", LORA, f"{ACTOR}.fsdp_config.fsdp_size=1", TWO_RANKS],
            "does nothing where each of 2 ranks holds the whole weights",
        ),
        ([BLOCKS], "gather=blocks has no effect with one device"),
        ([BLOCKS, TWO_RANKS, f"{ACTOR}.fsdp_config.fsdp_size=1"], "where each of 2 ranks holds the whole weights"),
        ([BLOCKS, TWO_RANKS, "actor_rollout_ref.rollout.precision=fp8"], "precision=fp8 needs the whole weights"),
        ([BLOCKS, TWO_RANKS, LORA, f"{ACTOR}.engine.fold_lora=true"], "fold_lora=true folds into"),
        ([BLOCKS, TWO_RANKS, "trainer.mode=separate"], "gather=blocks has no effect with actor_rollout"),
        ([TOGETHER, TWO_RANKS], "share_samples=true has no effect where no ranks share samples"),
        ([TOGETHER, TWO_RANKS, f"{ULYSSES}=2", BLOCKS], "share_samples=true does not go with"),
        ([TOGETHER, TWO_RANKS, f"{ULYSSES}=2", "trainer.mode=separate"], "share_samples=true has no effect with"),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "a rollout server draws with one device"),
        ([LORA, INT8, f"{ACTOR}.engine.fold_lora=true"], "base_precision=int8: actor_rollout_ref.actor.engine.fold_"),
        ([INT8], "base_precision=int8 has no effect with actor_rollout_ref.model.lora_rank=0"),
        ([LORA, f"{MODEL}.target_modules=[to_q,to_qq]"], 'target_modules "to_qq": did you mean "to_q"'),
        ([LORA, f"{MODEL}.target_modules=nothing.*"], "target_modules=nothing.* matches no layer of QwenImageTransf"),
        ([LORA, f"{MODEL}.lora_path=/no/such/lora"], 'lora_path="/no/such/lora" holds no LoRA: expected a folder'),
        ([LORA, f"{MODEL}.lora_init=pissa"], "known: default, gaussian"),
        ([f"{ACTOR}.optim.betas=[0.9]"], "betas=[0.9]: expected two numbers"),
        ([f"{ACTOR}.optim.optimizer=SGD", f"{ACTOR}.optim.eps=1e-4"], "eps=0.0001 has no effect with"),
        ([f"{ACTOR}.optim.optimizer=Adafactor", f"{ACTOR}.optim.fused=true"], "torch has no fused Adafactor"),
        ([f"{ACTOR}.engine.attention_backend=_native_cudn"], 'did you mean "_native_cudnn"'),
        ([f"+{ROLLOUT}.engine_kwargs.decode_batch=2"], 'did you mean "decode_batch_size"'),
        ([f"+{ROLLOUT}.engine_kwargs.decode_batch_size=0"], "decode_batch_size=0: expected a whole number, 1 or more"),
        ([f"+{ROLLOUT}.engine_kwargs.device=cpu"], "known: decode_batch_size, prompt_cache_m"),
        (["trainer.logger=[]"], "trainer.logger=[] would leave no trace"),
        (["trainer.default_local_dir={file}"], "is a file, not a folder"),
        (["trainer.default_local_dir={file}/run"], "is a file, not a folder"),
        (["trainer.default_local_dir={loop}"], "cannot be made or opened: Too many levels of symbolic links"),
        (["trainer.default_local_dir={loop}/run"], "cannot be made or opened: Too many levels of symbolic links"),
    ],
)
def test_what_only_a_worker_would_find(overrides, said, tmp_path):
    places = {"file": tmp_path / "file", "loop": tmp_path / "loop"}
    places["file"].write_text("")
    places["loop"].symlink_to(places["loop"])
    assert said in refused(*[override.format(**places) for override in overrides])


@pytest.fixture
def engine_of_my_own(monkeypatch):
    """One that draws with the trained module, as diffusers' does, and one that only says that it draws."""
    monkeypatch.setattr(rollout._OWN, "_entries", dict(rollout._OWN._entries))
    monkeypatch.setattr("verl_omni.utils.registry.registrations", {})  # no worker is to import this file

    def add(name, **declared):
        bases = (BatchedRollout,) if name == "bare" else (DiffusersRollout,)
        rollout.register_rollout(name, server=RolloutServer)(type(name, bases, declared))

    return add


TOGETHER_ON_TWO = (TOGETHER, TWO_RANKS, f"{ULYSSES}=2")


@pytest.mark.parametrize("asked", [(BLOCKS, TWO_RANKS), TOGETHER_ON_TWO, (f"{ROLLOUT}.compile_vae=false",)])
def test_an_engine_that_draws_as_diffusers_does_is_asked_what_it_can(asked, engine_of_my_own):
    engine_of_my_own("mine")
    assert prepared(f"{ROLLOUT}.name=mine", *asked).actor_rollout_ref.rollout.name == "mine"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((BLOCKS, TWO_RANKS), "rollout.name=bare does not say that it can (`draws_by_blocks`); leave it out, or set"),
        (TOGETHER_ON_TWO, "rollout.name=bare does not say that it can (`draws_together`); leave it out"),
        ((f"{ROLLOUT}.encoder_offload=true",), "encoder_offload=true does nothing with actor_rollout_ref.rollout."),
        ((LORA, INT8), "rollout.name=bare holds weights in full, and would draw with others than training has; set"),
        ((f"{ROLLOUT}.precision=fp8",), "rollout.name=bare does not say that it can draw so (`precisions`)"),
    ],
)
def test_an_engine_that_says_nothing_of_itself_is_taken_at_its_word(asked, said, engine_of_my_own):
    engine_of_my_own("bare")
    assert said in refused(f"{ROLLOUT}.name=bare", *asked)


def test_an_engine_says_itself_what_it_cannot_draw(engine_of_my_own):
    def check(cls, settings):
        raise ValueError(f"mine draws no {settings.actor_rollout_ref.model.architecture}")

    engine_of_my_own("mine", check=classmethod(check), has_a_copy=True, draws_by_blocks=False)
    assert "mine draws no QwenImagePipeline" in refused(f"{ROLLOUT}.name=mine")
    engine_of_my_own("other", has_a_copy=True, draws_by_blocks=False)
    assert "rollout.name=other draws with a copy of its own" in refused(f"{ROLLOUT}.name=other", BLOCKS, TWO_RANKS)
    folded = (LORA, f"{ACTOR}.engine.fold_lora=true")
    assert "fold_lora=true does nothing with actor_rollout_ref" in refused(f"{ROLLOUT}.name=other", *folded)


@pytest.mark.parametrize(("tracker", "package"), [("wandb", "wandb"), ("vemlp_wandb", "volcengine_ml_platform")])
def test_a_tracker_whose_package_is_missing(tracker, package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == package else find(name, *a))
    assert f"{tracker}, which is not installed here: pip install {package}" in refused(f"trainer.logger=[{tracker}]")


def test_a_training_engine_whose_package_is_missing(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "veomni" else find(name, *a))
    assert "strategy=veomni: veomni is not installed here; type make veomni" in refused(f"{ACTOR}.strategy=veomni")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("StableDiffusion3Pipeline", {}, "VeOmni has no SD3Transformer2DModel, only QwenImageTransformer2DModel and"),
        (
            "QwenImagePipeline",
            {"fsdp_config": FSDPConfig(fsdp_size=2)},
            "fsdp_config.fsdp_size=2 has no effect with actor_rollout_ref.actor.strategy=veomni, whose settings are in",
        ),
        (
            "QwenImagePipeline",
            {"veomni_config": VeOmniConfig(ulysses_parallel_size=3)},
            "ulysses_parallel_size=3 does not divide the 2 attention heads of QwenImageTransformer2DModel",
        ),
    ],
)
def test_what_veomni_cannot_train(name, settings, said):
    model = DiffusionModelConfig(path=str(tiny_checkpoint(name)))
    with pytest.raises(ValueError, match=said):
        check_training_engine(model, DiffusionActorConfig(strategy="veomni", **settings))


def test_settings_of_veomni_have_no_effect_on_another_engine():
    line = refused(f"{ACTOR}.veomni_config.fsdp_size=1")
    assert "veomni_config.fsdp_size=1 has no effect with actor_rollout_ref.actor.strategy=fsdp2" in line


def test_an_attention_kernel_whose_package_is_missing():
    """diffusers itself says what to install; no machine has this one, which needs another kind of accelerator."""
    line = refused(f"{ACTOR}.engine.attention_backend=_native_npu")
    assert line.startswith(f"{ACTOR}.engine.attention_backend=_native_npu: ") and "torch_npu" in line


def test_a_lora_file_of_another_rank(tmp_path):
    name = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"
    save_file({name: torch.zeros(8, 16)}, tmp_path / "pytorch_lora_weights.safetensors")
    assert "has LoRA of rank [8]" in refused(LORA, f"{MODEL}.lora_path={tmp_path}")
    (tmp_path / "pytorch_lora_weights.safetensors").write_text("no tensors")
    assert "is no readable safetensors file" in refused(LORA, f"{MODEL}.lora_path={tmp_path}")


def test_good_targets_kernels_and_arguments_pass():
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Backends

    before = Backends.get_active_backend()
    assert prepared(LORA, f"{MODEL}.target_modules=[to_q,img_mlp.net.2]", f"{ACTOR}.engine.attention_backend=flex")
    assert Backends.get_active_backend() == before  # a check changes nothing for what this process computes
    assert prepared(LORA, f"{MODEL}.target_modules='.*to_q'", f"+{ROLLOUT}.engine_kwargs.prompt_cache_size=8")
    for name in OPTIMIZERS:
        assert prepared(f"{ACTOR}.optim.optimizer={name}", f"{ACTOR}.optim.lr_scheduler_type=cosine")


def test_twenty_billion_parameters_cost_seconds(tmp_path):
    """The layers' names are known without their weights."""
    config = {"_class_name": "QwenImageTransformer2DModel", "num_layers": 60}
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/config.json").write_text(json.dumps(config))
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    start = time.process_time()
    (part,) = empty_modules(DiffusionModelConfig(path=str(tmp_path)))
    assert sum(p.numel() for p in part.parameters()) > 20e9 and next(part.parameters()).is_meta
    assert time.process_time() - start < 10
