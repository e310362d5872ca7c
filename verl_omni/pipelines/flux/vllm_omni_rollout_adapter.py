"""FLUX.1 in vLLM-Omni."""

from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from vllm_omni.diffusion.models.flux import FluxPipeline

from verl_omni.pipelines.vllm_omni import VllmOmniPipelineBase


@VllmOmniPipelineBase.register("FluxPipeline", algorithm="flow_grpo")
class FluxPipelineWithLogProb(VllmOmniPipelineBase, FluxPipeline):
    image_processor = VaeImageProcessor()

    def predict(self, **inputs: Any) -> torch.Tensor:
        return self.transformer(**inputs).sample
