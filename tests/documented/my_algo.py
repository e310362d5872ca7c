"""A new policy-gradient algorithm, written by the steps of the public guide, in a user's own file.

Signatures, class attributes, names of tensors and decorators are the guide's to the letter; what it leaves as `...` is
filled in. The loss names no defaults, its metrics carry their prefix, and `my_sde` is known to the scheduler alone.
"""

from typing import Any

import numpy as np
import torch

from verl_omni.pipelines.model_base import DiffusionModelBase, VllmOmniPipelineBase
from verl_omni.pipelines.qwen_image_flow_grpo import QwenImage
from verl_omni.pipelines.schedulers.flow_match_sde import FlowMatchSDEDiscreteScheduler
from verl_omni.trainer.config.algorithm import DiffusionAlgoConfig
from verl_omni.trainer.diffusion.diffusion_algos import (
    DiffusionLossFn,
    DiffusionLossResult,
    register_diffusion_adv_est,
    register_diffusion_loss,
)
from verl_omni.workers.config import DiffusionActorConfig

# Step 1: an SDE step formula.


class MyScheduler(FlowMatchSDEDiscreteScheduler):
    def sample_previous_step(self, *args, sde_type="sde", noise_level=0.7, **kwargs):
        if sde_type == "my_sde":  # a new branch
            return super().sample_previous_step(*args, sde_type="sde", noise_level=noise_level / 2, **kwargs)
        return super().sample_previous_step(*args, sde_type=sde_type, noise_level=noise_level, **kwargs)


# Step 2: the advantage estimator.


@register_diffusion_adv_est("my_algo")
def compute_my_algo_outcome_advantage(
    sample_level_rewards: torch.Tensor,
    index: np.ndarray,
    norm_adv_by_std_in_grpo: bool = True,
    global_std: bool = True,
    config: DiffusionAlgoConfig | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of its group gets 1, the others -1."""
    advantages = -torch.ones_like(sample_level_rewards)
    for group in set(index):
        rows = np.flatnonzero(index == group)
        advantages[rows[sample_level_rewards[rows].argmax()]] = 1.0
    returns = advantages
    return advantages, returns


# Step 3: the loss.


@register_diffusion_loss("my_algo")
class MyAlgoLoss(DiffusionLossFn):
    """Flow-GRPO clipped policy objective."""

    required_model_output_keys = ("log_probs",)
    required_data_keys = ("old_log_probs", "advantages")

    @classmethod
    def compute_loss(
        cls,
        *,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        config: DiffusionActorConfig,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Clipped-PPO objective averaged across denoising steps."""
        clip_ratio, adv_clip_max = config.diffusion_loss.clip_ratio, config.diffusion_loss.adv_clip_max
        advantages = torch.clamp(advantages, -adv_clip_max, adv_clip_max)
        ratio = torch.exp(log_prob - old_log_prob)
        unclipped = -advantages * ratio
        clipped = -advantages * torch.clamp(ratio, 1.0 - clip_ratio, 1.0 + clip_ratio)
        pg_loss = torch.mean(torch.maximum(unclipped, clipped))
        pg_metrics = {
            "actor/ppo_kl": (old_log_prob - log_prob).mean().item(),
            "actor/ratio_max_dev": (ratio - 1).abs().max().item(),
        }
        return pg_loss, pg_metrics

    def __call__(self, *, config, model_output, data) -> DiffusionLossResult:
        pg_loss, pg_metrics = self.compute_loss(
            old_log_prob=data["old_log_probs"],
            log_prob=model_output["log_probs"],
            advantages=data["advantages"],
            config=config,
        )
        return DiffusionLossResult(loss=pg_loss, metrics=pg_metrics)


# Step 4: the (architecture, algorithm) adapter pair.


@DiffusionModelBase.register("QwenImagePipeline", algorithm="my_algo")
class QwenImageMyAlgo(QwenImage):
    @classmethod
    def build_scheduler(cls, model_config):
        return MyScheduler.from_pretrained(model_config.path, subfolder="scheduler")

    @classmethod
    def forward_and_sample_previous_step(
        cls, module, scheduler, model_config, model_inputs, negative_model_inputs, scheduler_inputs, step
    ):
        """Call the transformer once for the positive prompt; if CFG is active, again for the negative prompt."""
        noise_pred = module(**model_inputs, return_dict=False)[0].float()
        if negative_model_inputs is not None:
            with torch.no_grad():
                negative = module(**negative_model_inputs, return_dict=False)[0].float()
            noise_pred = cls.combine_cfg(noise_pred, negative, model_config.pipeline.true_cfg_scale)
        _, log_prob, prev_sample_mean, std_dev_t = scheduler.sample_previous_step(
            sample=scheduler_inputs["sample"],
            model_output=noise_pred,
            timestep=scheduler_inputs["timestep"],
            prev_sample=scheduler_inputs["prev_sample"],
            noise_level=model_config.algo.noise_level,
            sde_type=model_config.algo.sde_type,
        )
        return log_prob, prev_sample_mean, std_dev_t


@VllmOmniPipelineBase.register("QwenImagePipeline", algorithm="my_algo")
class QwenImageMyAlgoPipelineWithLogProb:
    def forward(self, req, *, sde_type="my_sde", sde_window_size=None, **kw):
        raise NotImplementedError("vllm-omni is not installed here")
