"""What the direct-preference losses share: they train on noised clean latents at single noise levels t = σ."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.advantages import apply_adv_mode, weighted_rewards
from verl_omni.algorithms.base import column, row_mean
from verl_omni.algorithms.registry import estimate_advantages, get_algorithm, get_diffusion_loss_fn
from verl_omni.utils.suggest import unknown

if TYPE_CHECKING:
    from verl import DataProto

    from verl_omni.config import DiffusionActorConfig

TEACHER = "teacher"  # the policy that stands for each row's own one
SIGMA_DISTRIBUTIONS = ("uniform", "logit_normal", "rollout", "last")


def noised(clean_latents: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """``x_t = (1-t)·x0 + t·ε`` with t (B,), or (B, N) where parts of a sample have levels of their own."""
    t = column(sigma, clean_latents)
    return (1 - t) * clean_latents + t * noise


def predicted_clean(x_t: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """``x̂0 = x_t - t·v`` with t (B,) or (B, N): what the model takes x_t for."""
    return x_t - column(sigma, x_t) * velocity


def matching_error(velocity: torch.Tensor, clean_latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """``mean((v - (ε - x0))²)`` of each row: (B,)."""
    return row_mean((velocity - (noise - clean_latents)) ** 2)


def velocity_distance(velocity: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``mean((v - v_other)²)`` of each row, with a gradient to ``velocity`` only: (B,)."""
    return row_mean((velocity - other.detach()) ** 2)


def group_numbers(uids: Sequence[str]) -> torch.Tensor:
    """The number of each sample's group, (B,), counted as they first appear."""
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
    return torch.tensor([numbers[uid] for uid in uids])


def group_share(uids: Sequence[str]) -> torch.Tensor:
    """1/|G| of each sample's group: (B,)."""
    numbers = group_numbers(uids)
    return 1 / numbers.bincount()[numbers].float()


def anchor_policies(algorithm: str, config: "DiffusionActorConfig") -> dict[str, str]:
    """The velocities of other policies that the loss asks for, and whose they are.

    ``old_velocity`` is of the policy that made the samples, ``ema_velocity`` of the slowly following one,
    ``teacher_velocity`` of the teacher of a row's data_source.
    """
    policies = {
        "old_velocity": get_algorithm(algorithm).rollout_policy,
        "ref_velocity": "reference",
        "ema_velocity": "old",
        "teacher_velocity": TEACHER,
    }
    needed = get_diffusion_loss_fn(config.diffusion_loss.loss_mode).data_keys(config)
    return {key: policy for key, policy in policies.items() if key in needed}


def follows_old_policy(algorithm: str, config: "DiffusionActorConfig") -> bool:
    """Whether a copy of the policy has to follow the trained one: to sample with, or to stay close to."""
    sampling = get_algorithm(algorithm).rollout_policy
    return "old" in (sampling, *anchor_policies(algorithm, config).values())


def draw_sigmas(
    samples: int,
    count: int,
    distribution: str,
    generator: torch.Generator | None = None,
    schedule: torch.Tensor | None = None,
) -> torch.Tensor:
    """``count`` noise levels in (0, 1] for each sample: (samples, count).

    uniform and logit_normal draw them independently; rollout takes different ones of ``schedule``, the σ at which the
    rollout's steps start, and last the last ones of it.
    """
    if distribution not in SIGMA_DISTRIBUTIONS:
        raise ValueError(unknown("timestep distribution", distribution, SIGMA_DISTRIBUTIONS))
    if distribution == "uniform":
        return 1 - torch.rand(samples, count, generator=generator)
    if distribution == "logit_normal":
        return torch.randn(samples, count, generator=generator).sigmoid()
    if schedule is None or not 1 <= count <= len(schedule):
        steps = 0 if schedule is None else len(schedule)
        raise ValueError(f"{count} different noise levels of a rollout of {steps} steps: expected 1 to {steps}")
    if distribution == "last":
        return schedule.float().cpu()[-count:].repeat(samples, 1)
    order = torch.rand(samples, len(schedule), generator=generator).argsort(dim=1)
    return schedule.float().cpu()[order[:, :count]]


def level_starts(schedule: torch.Tensor, chained: int) -> torch.Tensor:
    """Those σ of ``schedule``, at which the rollout's steps start, that ``chained`` of its steps can follow."""
    return schedule[: len(schedule) - chained + 1]


def add_advantages(batch: "DataProto", reward_tensor: torch.Tensor, config: Any) -> "DataProto":
    """Group advantages of final samples, as `algorithm.adv_estimator` and `algorithm.adv_mode` say."""
    algo = config.algorithm
    rewards = reward_tensor.reshape(len(reward_tensor))
    advantages, _ = estimate_advantages(
        algo.adv_estimator,
        sample_level_rewards=rewards,
        index=batch.non_tensor_batch["uid"],
        norm_adv_by_std_in_grpo=algo.norm_adv_by_std_in_grpo,
        global_std=algo.global_std,
        config=algo,
        **weighted_rewards(batch, rewards, algo.reward_weights),
    )
    batch.batch["advantages"] = apply_adv_mode(advantages, algo.adv_mode)
    return batch
