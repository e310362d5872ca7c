"""Algorithms: one file each, found by name. Importing this package loads none of them."""

from verl_omni.algorithms.base import DiffusionLossFn, DiffusionLossResult
from verl_omni.algorithms.registry import (
    Algorithm,
    DiffusionAdvantageEstimator,
    algorithm_names,
    estimate_advantages,
    fill_nulls,
    get_algorithm,
    get_diffusion_adv_estimator_fn,
    get_diffusion_loss_fn,
    register_algorithm,
    register_diffusion_adv_est,
    register_diffusion_loss,
    resolve_algorithm_defaults,
)

__all__ = [
    "Algorithm",
    "DiffusionAdvantageEstimator",
    "DiffusionLossFn",
    "DiffusionLossResult",
    "algorithm_names",
    "estimate_advantages",
    "fill_nulls",
    "get_algorithm",
    "get_diffusion_adv_estimator_fn",
    "get_diffusion_loss_fn",
    "register_algorithm",
    "register_diffusion_adv_est",
    "register_diffusion_loss",
    "resolve_algorithm_defaults",
]
