"""An extension as it was written before files moved: a loss, an adapter and a reward, all from the older addresses."""

from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.qwen_image_flow_grpo.diffusers_training_adapter import QwenImage
from verl_omni.trainer.diffusion.diffusion_algos import FlowGRPOLoss, register_diffusion_loss
from verl_omni.utils.knob import Range
from verl_omni.utils.reward_score import register_reward
from verl_omni.workers.config import DiffusionActorConfig, DiffusionModelConfig
from verl_omni.workers.config.diffusion.rollout import DiffusionPipelineConfig

SEEN = {"bright": Range(least=0, most=1), "pipelines": []}


@register_diffusion_loss("older")
class OlderLoss(FlowGRPOLoss):
    @classmethod
    def compute_loss(cls, *, config: DiffusionActorConfig, **kwargs):
        loss, metrics = super().compute_loss(config=config, **kwargs)
        return 2 * loss, {**metrics, "doubled": 2.0}


@DiffusionModelBase.register("QwenImagePipeline", algorithm="older")
class OlderQwenImage(QwenImage):
    @classmethod
    def cfg_scale(cls, model_config: DiffusionModelConfig) -> float:
        assert isinstance(model_config.pipeline, DiffusionPipelineConfig)
        SEEN["pipelines"].append(model_config.pipeline)
        return super().cfg_scale(model_config)


@register_reward("older_brightness")
def brightness(images, ground_truths, prompts, extra_infos, *, wanted: float = 0.5):
    return [{"score": 1 - abs(image.convert("L").resize((1, 1)).getpixel((0, 0)) / 255 - wanted)} for image in images]
