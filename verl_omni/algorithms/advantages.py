"""Advantages from one outcome reward per image, compared within the images of one prompt."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl_omni.algorithms.base import column
from verl_omni.algorithms.registry import DiffusionAdvantageEstimator, register_diffusion_adv_est
from verl_omni.utils.suggest import unknown

if TYPE_CHECKING:
    from verl import DataProto

GDPO_LEAST_STD = 1e-6


@register_diffusion_adv_est(DiffusionAdvantageEstimator.FLOW_GRPO, rewards="one")
@torch.no_grad()
def compute_flow_grpo_outcome_advantage(
    sample_level_rewards: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-4,
    norm_adv_by_std_in_grpo: bool = True,
    global_std: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(r - mean of the group) / (std + epsilon)``; exactly 0 where a group's rewards are equal, or in a group of one.

    Args:
        sample_level_rewards: (B,), or (B, T), where each column is taken by itself.
        index: (B,) the prompt that each image belongs to.
        epsilon: keeps the divisor away from 0.
        norm_adv_by_std_in_grpo: divide by the standard deviation; without it this is Dr.GRPO (arXiv 2503.20783).
        global_std: the standard deviation is the whole batch's, not the group's.
        config: the `algorithm` section: `adv_std_ddof`, 1 without it.
        kwargs: what other estimators need; not used here.

    Returns:
        advantages and returns, which are the same here, of the rewards' shape.
    """
    rewards = checked_rewards(sample_level_rewards, index)
    groups, batch = _Groups(index), _Groups(np.zeros(len(index)))
    advantages = groups.deviations(rewards)
    if norm_adv_by_std_in_grpo:
        compared = batch if global_std else groups
        advantages /= compared.std(compared.deviations(rewards), _ddof(config)) + epsilon
    advantages = advantages.float()
    return advantages, advantages


@register_diffusion_adv_est(DiffusionAdvantageEstimator.GDPO, rewards="several")
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    index: np.ndarray,
    sample_level_reward_components: Mapping[str, torch.Tensor] | torch.Tensor | None = None,
    reward_weights: Mapping[str, float] | list[float] | None = None,
    epsilon: float = 1e-4,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GDPO: several rewards, each standardised within its group before they are added up.

    ``Σ_k w_k·(r_k - μ_g)/max(σ_g, 1e-6)``, then standardised over the batch, so that no reward outweighs the others by
    its scale alone. A reward that is equal for all images of a prompt adds exactly 0 there.

    Args:
        index: (B,) the prompt that each image belongs to.
        sample_level_reward_components: the rewards by name, each (B,), or as one tensor (B, K).
        reward_weights: by name, or in the order of the columns; 1 each by default.
        epsilon: keeps the last divisor away from 0.
        config: the `algorithm` section: `adv_std_ddof`, 1 without it.
        kwargs: what other estimators need; not used here.
    """
    if sample_level_reward_components is None:
        raise ValueError("adv_estimator=gdpo needs several rewards per image: the reward function returned only one")
    groups, batch, ddof = _Groups(index), _Groups(np.zeros(len(index))), _ddof(config)
    total = 0.0
    for component, weight in _weighted(sample_level_reward_components, reward_weights):
        deviations = groups.deviations(checked_rewards(component, index))
        total = total + weight * deviations / groups.std(deviations, ddof).clamp_min(GDPO_LEAST_STD)
    # Each group's mean is 0, and so the batch's: taking it off again would give equal rewards its rounding.
    advantages = (total / (batch.std(total, ddof) + epsilon)).float()
    return advantages, advantages


# How a direct-preference loss reads an advantage, as published with DiffusionNFT
ADV_MODES = {
    "continuous": lambda a: a,
    "positive_only": lambda a: a.clamp_min(0),
    "negative_only": lambda a: a.clamp_max(0),
    "one_only": lambda a: (a > 0).to(a.dtype),
    "binary": torch.sign,
}


def apply_adv_mode(advantages: torch.Tensor, mode: str) -> torch.Tensor:
    """`algorithm.adv_mode`: the advantage itself, one side of it, or only its sign."""
    if mode not in ADV_MODES:
        raise ValueError(unknown("algorithm.adv_mode", mode, ADV_MODES))
    return ADV_MODES[mode](advantages)


class _Groups:
    """The images of each prompt. Of values (B, ...) it says something for each row, in float64.

    In float32 the mean of sixteen rewards of 0.7 is off by a rounding step, which standardising would blow up, and of
    which `adv_mode=binary` would take the sign.
    """

    def __init__(self, index: np.ndarray) -> None:
        _, first, group, count = np.unique(index, return_index=True, return_inverse=True, return_counts=True)
        self.group, self.groups = torch.from_numpy(group), len(count)
        self.first, self.count = torch.from_numpy(first[group]), torch.from_numpy(count[group])

    def deviations(self, values: torch.Tensor) -> torch.Tensor:
        """From the group's mean. Exactly 0 where all of a group's values are equal: each is first compared with one."""
        offsets = values.double() - values[self.first].double()
        return offsets - self._sum(offsets) / column(self.count, offsets).to(offsets.device)

    def std(self, deviations: torch.Tensor, ddof: int) -> torch.Tensor:
        """0 for a single value, which has no spread to speak of."""
        degrees = column((self.count - ddof).clamp_min(1), deviations).to(deviations.device)
        return (self._sum(deviations**2) / degrees).sqrt()

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        group = self.group.to(values.device)
        return values.new_zeros(self.groups, *values.shape[1:]).index_add_(0, group, values)[group]


def _ddof(config: Any) -> int:
    return getattr(config, "adv_std_ddof", 1)


def checked_rewards(rewards: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """Rewards in float32. One that is not a number must never turn into a silent 0."""
    rewards = torch.as_tensor(rewards).detach().float()
    if len(rewards) != len(index):
        raise ValueError(f"{len(rewards)} rewards for {len(index)} images")
    bad = (~torch.isfinite(rewards)).flatten(1).any(dim=1) if rewards.ndim > 1 else ~torch.isfinite(rewards)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(f'the reward of image {row} (prompt "{index[row]}") is {rewards[row].tolist()}, not a number')
    return rewards


def _weighted(
    components: Mapping[str, torch.Tensor] | torch.Tensor, weights: Mapping[str, float] | list[float] | None
) -> Iterator[tuple[torch.Tensor, float]]:
    """Each reward with its weight."""
    if not isinstance(components, Mapping):
        components = dict(enumerate(torch.as_tensor(components).unbind(dim=1)))
    if weights is None:
        weights = dict.fromkeys(components, 1.0)
    elif not isinstance(weights, Mapping):
        weights = dict(enumerate(weights))
    if set(weights) != set(components):
        raise ValueError(
            f"reward weights are given for {sorted(map(str, weights))}, rewards for {sorted(map(str, components))}"
        )
    for name, component in components.items():
        yield component, weights[name]


def weighted_rewards(data: "DataProto", rewards: torch.Tensor, weights: Mapping[str, float]) -> dict[str, Any]:
    """What an estimator of several rewards is given: each image's, by the names that the reward function gives them.

    `score` is the function's main reward. Nothing where `algorithm.reward_weights` names none.
    """
    if not weights:
        return {}
    returned = data.non_tensor_batch.get("reward_extra_info", [{}] * len(data))
    known = {"score", *(name for extra in returned for name in extra)}
    for name in weights:
        if name not in known:
            raise ValueError(unknown("reward in algorithm.reward_weights", name, known))
    components = {name: rewards if name == "score" else _told(name, returned) for name in weights}
    return {"sample_level_reward_components": components, "reward_weights": weights}


def _told(name: str, returned: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """What the reward function gave each image under `name`."""
    values = [extra.get(name) for extra in returned]
    try:
        return torch.tensor([float(value) for value in values])
    except (TypeError, ValueError):
        wrong = next(value for value in values if not isinstance(value, int | float))
        raise ValueError(
            f'algorithm.reward_weights adds up "{name}", and the reward function gave an image {wrong!r} under that '
            "name: expected a number for each"
        ) from None
