"""An algorithm that reuses an existing estimator and loss: all that is registered under its name is an adapter."""

from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.qwen_image_flow_grpo import QwenImage


@DiffusionModelBase.register("QwenImagePipeline", algorithm="my_mix")
class QwenImageMyMix(QwenImage):
    pass
