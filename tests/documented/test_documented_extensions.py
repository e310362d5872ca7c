"""Extensions written by the public guides, word for word, in a user's own files beside this one."""

import json
import shutil
from pathlib import Path

import my_algo
import my_mix
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from e2e_runs import settings
from engine_cases import make_engine, model_config, roll_out
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tiny_models import tiny_checkpoint
from torch.utils.data import SequentialSampler

from verl_omni.algorithms import get_diffusion_adv_estimator_fn
from verl_omni.config import (
    DiffusionModelConfig,
    schema,
)
from verl_omni.data import PromptDataset
from verl_omni.pipelines.model_base import DiffusionModelBase, VllmOmniPipelineBase
from verl_omni.pipelines.qwen_image_flow_grpo import QwenImage
from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.trainer.diffusion.ray_diffusion_trainer import PolicyGradientRayTrainer
from verl_omni.workers.losses import build_loss_function

MODEL = "actor_rollout_ref.model."
PIN = ["algorithm.adv_estimator=flow_grpo", "actor_rollout_ref.actor.diffusion_loss.loss_mode=flow_grpo"]


def prepared(*overrides: str, model: Path | None = None):
    """The settings of a run, checked, as objects."""
    schema.register()
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        return OmegaConf.to_object(
            prepare_config(compose("diffusion_trainer", settings("run", *overrides, model=model)))
        )


@pytest.fixture(scope="module")
def my_model(tmp_path_factory) -> Path:
    """A model of an architecture that nobody but the user knows."""
    folder = tmp_path_factory.mktemp("my-model") / "model"
    shutil.copytree(tiny_checkpoint(), folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "MyModelPipeline"}))
    return folder


# ---- the policy-gradient guide -------------------------------------------------------------------------


def test_one_flag_selects_all_that_the_guide_registers():
    config = prepared(f"{MODEL}algorithm=my_algo", "actor_rollout_ref.rollout.algo.sde_type=my_sde")
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    assert isinstance(build_loss_function(actor).loss_fn, my_algo.MyAlgoLoss)
    assert get_diffusion_adv_estimator_fn(config.algorithm.adv_estimator) is my_algo.compute_my_algo_outcome_advantage
    assert DiffusionModelBase.get_class(model) is my_algo.QwenImageMyAlgo
    assert VllmOmniPipelineBase.get_class("QwenImagePipeline", "my_algo") is my_algo.QwenImageMyAlgoPipelineWithLogProb
    other = DiffusionModelConfig(architecture="QwenImagePipeline", algorithm="flow_grpo")
    assert DiffusionModelBase.get_class(other) is QwenImage


def test_the_guides_loss_reads_flow_grpos_settings_from_the_config():
    """mean(max(-Aρ, -A·clip(ρ))) with A clamped to ±5 and ρ to 1 ± 1e-4, by hand."""
    actor = prepared(f"{MODEL}algorithm=my_algo").actor_rollout_ref.actor
    ratio, advantages = torch.tensor([1.5, 0.5, 1.0]), torch.tensor([9.0, -1.0, 2.0])
    result = build_loss_function(actor)(
        {"log_probs": ratio.log()}, {"old_log_probs": torch.zeros(3), "advantages": advantages}
    )
    assert result.loss.item() == pytest.approx((-5 * 1.0001 + 0.9999 - 2) / 3)
    assert {"ppo_kl", "ratio_max_dev"} <= result.metrics.keys()


@pytest.mark.parametrize("pinned", [PIN, []], ids=["pinned", "cascaded"])
def test_an_algorithm_may_be_an_adapter_alone(pinned):
    config = prepared(f"{MODEL}algorithm=my_mix", *pinned)
    assert DiffusionModelBase.get_class(config.actor_rollout_ref.model) is my_mix.QwenImageMyMix
    assert config.actor_rollout_ref.actor.diffusion_loss.loss_mode == "flow_grpo"
    by_name = get_diffusion_adv_estimator_fn(config.algorithm.adv_estimator)
    assert by_name is get_diffusion_adv_estimator_fn("flow_grpo")
    assert (config.algorithm.trainer_type, config.actor_rollout_ref.rollout.algo.sde_type) == ("policy_gradient", "sde")


@pytest.mark.parametrize("where", ["rollout.algo.sde_type", "rollout.val_kwargs.sde_type"])
def test_a_step_type_is_known_to_us_or_to_the_adapters_scheduler(where):
    step = [f"actor_rollout_ref.{where}=my_sde", "actor_rollout_ref.rollout.val_kwargs.noise_level=0.5"]
    prepared(f"{MODEL}algorithm=my_algo", *step)
    with pytest.raises(ValueError, match='unknown sde_type "my_sde"'):
        prepared(f"{MODEL}algorithm=my_mix", *step)
    with pytest.raises(ValueError, match="noise_level=0.0 adds no noise"):
        prepared(f"{MODEL}algorithm=my_algo", *step, "actor_rollout_ref.rollout.algo.noise_level=0")


class BrandNewScheduler(FlowMatchEulerDiscreteScheduler):
    """Nothing of ours: a flow-matching scheduler that exposes `sample_previous_step`. x' = x + dt·v + a·√(-dt)·z."""

    def sample_previous_step(
        self, sample, model_output, timestep, generator=None, noise_level=0.7, prev_sample=None, sde_type="sde"
    ):
        assert sde_type == "my_own"
        index = (self.timesteps[None] == timestep.reshape(-1, 1)).int().argmax(dim=1)
        column = (-1, *[1] * (sample.ndim - 1))
        sigma, sigma_next = (self.sigmas[i].reshape(column) for i in (index, index + 1))
        mean = sample + (sigma_next - sigma) * model_output
        std_dev_t = torch.as_tensor(noise_level, dtype=torch.float32).expand(len(sample)).reshape(column)
        std = std_dev_t * (sigma - sigma_next).sqrt()
        if prev_sample is None:
            prev_sample = mean + std * torch.stack([torch.randn(mean.shape[1:], generator=g) for g in generator])
        density = torch.distributions.Normal(mean, std.clamp_min(1e-6)).log_prob(prev_sample)
        return prev_sample, density.flatten(1).mean(dim=1), mean, std_dev_t


@DiffusionModelBase.register("QwenImagePipeline", algorithm="brand_new")
class QwenImageBrandNew(QwenImage):
    @classmethod
    def build_scheduler(cls, model_config):
        return BrandNewScheduler.from_pretrained(model_config.path, subfolder="scheduler")


def test_a_brand_new_scheduler_samples_and_replays(process_group):
    prepared(f"{MODEL}algorithm=brand_new", "actor_rollout_ref.rollout.algo.sde_type=my_own")
    engine = make_engine(model_config(tiny_checkpoint(), "my_own", cfg=True, algorithm="brand_new"))
    batch = roll_out(engine)
    replayed = engine.infer_batch(batch)["model_output"]["log_probs"]
    torch.testing.assert_close(replayed, batch["old_log_probs"].flatten(), rtol=0, atol=1e-5)
    assert replayed.std() > 0


# ---- the model guide -----------------------------------------------------------------------------------


def test_an_adapter_of_four_classmethods_trains(my_model, process_group):
    """Steps that the built-in adapter drew are as likely under the guide's, whose engine only trains."""
    import my_model_flow_grpo

    batch = roll_out(make_engine(model_config(tiny_checkpoint(), cfg=True)))
    batch.pop("uncond_velocity", None)
    engine = make_engine(model_config(my_model, cfg=True))
    assert engine.adapter is my_model_flow_grpo.MyModel
    replayed = engine.infer_batch(batch)["model_output"]["log_probs"]
    torch.testing.assert_close(replayed, batch["old_log_probs"].flatten(), rtol=0, atol=1e-5)


def test_what_the_embedded_engine_misses_is_said_before_anything_starts(my_model):
    with pytest.raises(ValueError) as caught:
        prepared(f"{MODEL}external_lib=my_model_flow_grpo", model=my_model)
    line = str(caught.value)
    assert "MyModel, the adapter of MyModelPipeline, has no tokenize, encode_prompt, prepare_latents, decode" in line
    assert "\n" not in line and "actor_rollout_ref.rollout.name=diffusers" in line


def test_a_vae_that_does_not_tell_its_scale_is_named(my_model, tmp_path):
    shutil.copytree(my_model, tmp_path / "model")
    (tmp_path / "model/vae/config.json").write_text("{}")
    config = DiffusionModelConfig(path=str(tmp_path / "model"))
    with pytest.raises(ValueError, match="the VAE in .*model does not say .* give QwenImage a classmethod vae_scale"):
        QwenImage.vae_scale_factor(config)


# ---- the trainer's interface ---------------------------------------------------------------------------


def test_the_trainer_takes_its_prompts_from_train_sampler():
    config = prepared("data.train_batch_size=4", "trainer.total_training_steps=null", "trainer.total_epochs=3")
    data = PromptDataset(config.data.train_files)
    trainer = PolicyGradientRayTrainer(
        config=OmegaConf.structured(config),
        tokenizer=None,
        role_worker_mapping={},
        resource_pool_manager=None,
        train_dataset=data,
        train_sampler=SequentialSampler([0, 1]),
    )
    prompts = [data[i]["prompt"] for i in (0, 1, 0, 1)]
    assert next(iter(trainer.train_loader))["prompt"].tolist() == prompts
    assert trainer.total_steps == 2  # three epochs of two prompts, four at a time
