"""Wan, image to video, in vLLM-Omni: 2.1 with CLIP, 2.2 with one transformer or two, TI2V."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from diffusers import WanImageToVideoPipeline
from diffusers.video_processor import VideoProcessor
from vllm_omni.diffusion.data import OmniDiffusionConfig

from verl_omni.pipelines.utils import read_index
from verl_omni.pipelines.vllm_omni import VllmOmniPipelineBase
from verl_omni.pipelines.wan.vllm_omni_rollout_adapter import WanPipelineWithLogProb, without_torchvision

with without_torchvision():
    from vllm_omni.diffusion.models.wan2_2 import Wan22I2VPipeline, pipeline_wan2_2_i2v

read_json = pipeline_wan2_2_i2v._load_json


def there(*args: Any) -> dict[str, Any]:
    """A second transformer that model_index.json says is not there, by [null, null], is one to vLLM-Omni."""
    return {name: value for name, value in read_json(*args).items() if value != [None, None]}


@VllmOmniPipelineBase.register("WanImageToVideoPipeline", algorithm="flow_grpo")
class WanImageToVideoPipelineWithLogProb(VllmOmniPipelineBase, Wan22I2VPipeline):
    """Given frames are prepared by diffusers' own methods, with the VAE and CLIP of this pipeline."""

    as_diffusers = WanPipelineWithLogProb.as_diffusers
    prepare_latents = WanImageToVideoPipeline.prepare_latents
    encode_image = WanImageToVideoPipeline.encode_image

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        with mock.patch.object(pipeline_wan2_2_i2v, "_load_json", there):
            super().__init__(od_config=od_config, prefix=prefix)
        self.video_processor = VideoProcessor(vae_scale_factor=self.vae_scale_factor_spatial)
        expands = bool(read_index(od_config.model).get("expand_timesteps"))
        self.__dict__["config"] = SimpleNamespace(expand_timesteps=expands)

    @property
    def _execution_device(self) -> torch.device:
        return self.device
