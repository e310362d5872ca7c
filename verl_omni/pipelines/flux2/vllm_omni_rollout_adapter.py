"""FLUX.2-klein in vLLM-Omni."""

from typing import Any

import torch
from vllm_omni.diffusion.models.flux2_klein import Flux2KleinPipeline

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.vllm_omni import AsDiffusers, VllmOmniPipelineBase


@VllmOmniPipelineBase.register("Flux2KleinPipeline", algorithm="flow_grpo")
class Flux2KleinPipelineWithLogProb(VllmOmniPipelineBase, Flux2KleinPipeline):
    def as_diffusers(self, model_config: DiffusionModelConfig) -> torch.nn.Module:
        return AsDiffusers(self.predict, self.od_config.tf_model_config)

    def predict(self, **inputs: Any) -> torch.Tensor:
        return self.transformer(**inputs).sample
