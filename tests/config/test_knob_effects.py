"""Another value of a knob changes what its consumer computes: for those whose consumer is a plain function."""

import dataclasses

import numpy as np
import pytest
import torch

from verl_omni.algorithms.advantages import apply_adv_mode, compute_flow_grpo_outcome_advantage
from verl_omni.algorithms.flow_grpo import FlowGRPOLoss
from verl_omni.algorithms.forward_process import draw_sigmas
from verl_omni.algorithms.old_policy import old_policy_decay
from verl_omni.config import OptimizerConfig
from verl_omni.config.knob import value_of
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.pipelines.schedulers.windows import sde_window
from verl_omni.workers.engine.module import resolve_dtypes
from verl_omni.workers.engine.optimizer import build_optimizer

ACTOR, ALGO = "actor_rollout_ref.actor", "actor_rollout_ref.rollout.algo"


def trained(config: OptimizerConfig) -> list[float]:
    """A weight after each of four steps on fixed gradients, and whether one kernel made them."""
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0]]))
    optimizer, schedule = build_optimizer([weight], config, torch.device("cpu"))
    path = [float(bool(optimizer.defaults.get("fused")))]
    for gradient in (1.0, -0.5, 2.0, 1e-7):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        schedule.step()
        path += weight.flatten().tolist()
    return path


def optimizer(settings: DiffusionTrainerConfig) -> list[float]:
    config = settings.actor_rollout_ref.actor.optim
    return trained(dataclasses.replace(config, total_training_steps=config.total_training_steps or 8))


def decaying(settings: DiffusionTrainerConfig) -> list[float]:
    """As `optimizer`, under a schedule that has an end."""
    settings.actor_rollout_ref.actor.optim.lr_scheduler_type = "linear"
    return optimizer(settings)


def loss(settings: DiffusionTrainerConfig) -> float:
    change = torch.tensor([0.5, -0.5, 1e-6, 0.2, -0.3])
    advantages = torch.tensor([9.0, -9.0, 1.0, 0.5, -0.4])
    return FlowGRPOLoss.compute_loss(
        old_log_prob=torch.zeros(5), log_prob=change, advantages=advantages, config=settings.actor_rollout_ref.actor
    )[0].item()


def advantages(settings: DiffusionTrainerConfig) -> list[float]:
    algorithm = settings.algorithm
    rewards, groups = torch.tensor([0.1, 0.9, 0.4, 0.45, 3.0, 3.3]), np.array(["a", "a", "b", "b", "c", "c"])
    found, _ = compute_flow_grpo_outcome_advantage(
        rewards,
        groups,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        global_std=algorithm.global_std,
        config=algorithm,
    )
    return apply_adv_mode(found, algorithm.adv_mode).tolist()


def windows(settings: DiffusionTrainerConfig) -> list[range]:
    algo, seed = settings.actor_rollout_ref.rollout.algo, settings.actor_rollout_ref.rollout.seed
    algo = dataclasses.replace(algo, sde_window_size=algo.sde_window_size or 2)
    return [sde_window(algo, 10, step, seed, group) for step in range(0, 90, 8) for group in range(3)]


def moving(settings: DiffusionTrainerConfig) -> list[range]:
    """As `windows`, under a schedule whose window moves."""
    settings.actor_rollout_ref.rollout.algo.sde_window_schedule = "progressive"
    return windows(settings)


def old_policy(settings: DiffusionTrainerConfig) -> list[float]:
    algorithm = settings.algorithm
    return [
        old_policy_decay(step, algorithm.old_policy_decay_schedule, algorithm.old_policy_decay) for step in (0, 9, 99)
    ]


def noise_levels(settings: DiffusionTrainerConfig) -> list[list[float]]:
    generator = torch.Generator().manual_seed(0)
    return draw_sigmas(2, 3, settings.algorithm.timestep_distribution, generator, torch.linspace(1, 0.1, 9)).tolist()


def dtypes(settings: DiffusionTrainerConfig) -> tuple[torch.dtype, torch.dtype]:
    """On a GPU, where weights may be held in either."""
    return resolve_dtypes(settings.actor_rollout_ref.actor.engine, torch.device("cuda"), lora=False)


EFFECTS = {
    f"{ACTOR}.optim.optimizer": (optimizer, "SGD"),
    f"{ACTOR}.optim.lr": (optimizer, 0.5),
    f"{ACTOR}.optim.betas": (optimizer, [0.5, 0.9]),
    f"{ACTOR}.optim.eps": (optimizer, 0.1),
    f"{ACTOR}.optim.weight_decay": (optimizer, 0.5),
    f"{ACTOR}.optim.fused": (optimizer, True),
    f"{ACTOR}.optim.lr_scheduler_type": (optimizer, "cosine"),
    f"{ACTOR}.optim.lr_warmup_steps": (optimizer, 3),
    f"{ACTOR}.optim.total_training_steps": (decaying, 5),
    f"{ACTOR}.diffusion_loss.clip_ratio": (loss, 0.1),
    f"{ACTOR}.diffusion_loss.clip_ratio_low": (loss, 0.3),
    f"{ACTOR}.diffusion_loss.clip_ratio_high": (loss, 0.3),
    f"{ACTOR}.diffusion_loss.adv_clip_max": (loss, 1.0),
    f"{ACTOR}.engine.dtype": (dtypes, "float32"),
    f"{ACTOR}.engine.model_dtype": (dtypes, "bfloat16"),
    f"{ALGO}.sde_window_size": (windows, 3),
    f"{ALGO}.sde_window_range": (windows, [0, 4]),
    f"{ALGO}.sde_window_schedule": (windows, "decay"),
    f"{ALGO}.sde_window_per_group": (windows, True),
    f"{ALGO}.sde_window_iters": (moving, 8),
    f"{ALGO}.sde_window_stride": (moving, 3),
    "actor_rollout_ref.rollout.seed": (windows, 1),
    "algorithm.norm_adv_by_std_in_grpo": (advantages, False),
    "algorithm.global_std": (advantages, False),
    "algorithm.adv_std_ddof": (advantages, 0),
    "algorithm.adv_mode": (advantages, "binary"),
    "algorithm.old_policy_decay_schedule": (old_policy, "linear_to_0_5"),
    "algorithm.old_policy_decay": (old_policy, 0.25),
    "algorithm.timestep_distribution": (noise_levels, "logit_normal"),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_another_value_has_another_effect(name):
    probe, value = EFFECTS[name]
    changed = DiffusionTrainerConfig()
    section, _, leaf = name.rpartition(".")
    assert value != getattr(value_of(changed, section), leaf)
    setattr(value_of(changed, section), leaf, value)
    assert probe(changed) != probe(DiffusionTrainerConfig())
    assert probe(DiffusionTrainerConfig()) == probe(DiffusionTrainerConfig()), "the probe itself is no accident"
