"""The trainers by their documented address."""

from verl_omni.trainer.diffusion.base_trainer import BaseRayDiffusionTrainer
from verl_omni.trainer.diffusion.direct_preference_trainer import DirectPreferenceRayTrainer
from verl_omni.trainer.diffusion.policy_gradient_trainer import PolicyGradientRayTrainer, compute_advantage

__all__ = [
    "BaseRayDiffusionTrainer",
    "DirectPreferenceRayTrainer",
    "PolicyGradientRayTrainer",
    "compute_advantage",
]
