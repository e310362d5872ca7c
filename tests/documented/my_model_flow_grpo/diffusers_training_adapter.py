"""The four classmethods of the public model guide, for a model whose transformer is Qwen-Image's."""

import numpy as np
import torch

from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.schedulers.flow_match_sde import FlowMatchSDEDiscreteScheduler


@DiffusionModelBase.register("MyModelPipeline", algorithm="flow_grpo")
class MyModel(DiffusionModelBase):
    @classmethod
    def build_scheduler(cls, model_config):
        return FlowMatchSDEDiscreteScheduler.from_pretrained(model_config.path, subfolder="scheduler")

    @classmethod
    def set_timesteps(cls, scheduler, model_config, device):
        """`image_seq_len` and `mu` exactly as the upstream diffusers pipeline has them."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

        steps, config = model_config.pipeline.num_inference_steps, scheduler.config
        image_seq_len = (model_config.pipeline.height // 16) * (model_config.pipeline.width // 16)
        mu = calculate_shift(
            image_seq_len, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu, device=device)

    @classmethod
    def prepare_model_inputs(
        cls,
        module,
        model_config,
        latents,
        timesteps,
        prompt_embeds,
        prompt_embeds_mask,
        negative_prompt_embeds,
        negative_prompt_embeds_mask,
        micro_batch,
        step,
    ):
        size = model_config.pipeline
        shared = {
            "hidden_states": latents[:, step],
            "timestep": timesteps[:, step] / 1000,
            "img_shapes": [[(1, size.height // 16, size.width // 16)]] * len(latents),
        }
        positive = shared | {
            "encoder_hidden_states": prompt_embeds,
            "encoder_hidden_states_mask": prompt_embeds_mask,
        }
        if size.true_cfg_scale <= 1:
            return positive, None
        return positive, shared | {
            "encoder_hidden_states": negative_prompt_embeds,
            "encoder_hidden_states_mask": negative_prompt_embeds_mask,
        }

    @classmethod
    def forward_and_sample_previous_step(
        cls, module, scheduler, model_config, model_inputs, negative_model_inputs, scheduler_inputs, step
    ):
        noise_pred = module(**model_inputs, return_dict=False)[0].float()
        if negative_model_inputs is not None:
            with torch.no_grad():
                negative = module(**negative_model_inputs, return_dict=False)[0].float()
            combined = negative + model_config.pipeline.true_cfg_scale * (noise_pred - negative)
            norms = noise_pred.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)
            noise_pred = combined * norms
        _, log_prob, prev_sample_mean, std_dev_t = scheduler.sample_previous_step(
            sample=scheduler_inputs["sample"],
            model_output=noise_pred,
            timestep=scheduler_inputs["timestep"],
            prev_sample=scheduler_inputs["prev_sample"],
            noise_level=model_config.algo.noise_level,
            sde_type=model_config.algo.sde_type,
        )
        return log_prob, prev_sample_mean, std_dev_t
