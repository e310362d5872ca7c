"""`trainer.mode=separate` as a trainer: rollout servers draw, the training workers learn, in turn."""

from typing import Any

from omegaconf import DictConfig, open_dict

from verl_omni.trainer.diffusion.policy_gradient_trainer import PolicyGradientRayTrainer


class SeparateRayFlowGRPOTrainer(PolicyGradientRayTrainer):
    """A policy-gradient trainer whose samples are drawn by servers, whatever `trainer.mode` says."""

    mode = "separate"

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any):
        with open_dict(config):
            config.trainer.mode = self.mode
            config.actor_rollout_ref.hybrid_engine = False
        super().__init__(config, *args, **kwargs)
