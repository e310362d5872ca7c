"""A model that makes sound: an adapter of somebody's own says so, and what its latents sound like."""

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.qwen_image.adapter import QwenImage
from verl_omni.utils.responses import Sound

RATE = 8000


@DiffusionModelBase.register("QwenImagePipeline", algorithm="toy_sound")
class Hum(QwenImage):
    """Two channels: the upper and the lower half of the picture, line by line."""

    @classmethod
    def makes(cls, model_config: DiffusionModelConfig) -> str:
        return "sound"

    @classmethod
    def responses(cls, decoded: torch.Tensor, pipe, model_config: DiffusionModelConfig) -> list[Sound]:
        waves = decoded.mean(dim=1).reshape(len(decoded), 2, -1)
        return [Sound(2 * wave - 1, RATE) for wave in waves]
