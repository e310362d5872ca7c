"""FLUX.2 in vLLM-Omni: dev and klein."""

from typing import Any
from unittest import mock

import torch
from transformers import AutoTokenizer, Mistral3ForConditionalGeneration
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.flux2 import pipeline_flux2
from vllm_omni.diffusion.models.flux2_klein import Flux2KleinPipeline

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.vllm_omni import AsDiffusers, VllmOmniPipelineBase


@VllmOmniPipelineBase.register("Flux2KleinPipeline", algorithm="flow_grpo")
class Flux2KleinPipelineWithLogProb(VllmOmniPipelineBase, Flux2KleinPipeline):
    def as_diffusers(self, model_config: DiffusionModelConfig) -> torch.nn.Module:
        return AsDiffusers(self.predict, self.od_config.tf_model_config)

    def predict(self, **inputs: Any) -> torch.Tensor:
        return self.transformer(**inputs).sample


class Mistral(Mistral3ForConditionalGeneration):
    """transformers' own, with what vLLM-Omni's pipeline asks of its encoder beside."""

    def set_processor(self, processor: Any, **messages: str) -> None:
        """For a prompt that the encoder itself writes longer, which ours does not."""


@VllmOmniPipelineBase.register("Flux2Pipeline", algorithm="flow_grpo")
class Flux2PipelineWithLogProb(VllmOmniPipelineBase, pipeline_flux2.Flux2Pipeline):
    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        """With the text encoder and the tokenizer of training.

        vLLM-Omni's encoder has other features for padding, which FLUX.2 reads without a mask, and does not find the
        config's rope_theta where transformers 5 has it. Its processor is for images too, and wants torchvision.
        """

        def encoder(*config: Any, **names: Any) -> Mistral:
            return Mistral.from_pretrained(od_config.model, subfolder="text_encoder")

        with mock.patch.multiple(pipeline_flux2, MistralEncoderModel=encoder, PixtralProcessor=AutoTokenizer):
            super().__init__(od_config=od_config, prefix=prefix)
        self.weights_sources = [source for source in self.weights_sources if source.subfolder != "text_encoder"]

    def as_diffusers(self, model_config: DiffusionModelConfig) -> torch.nn.Module:
        return AsDiffusers(self.predict, self.transformer.config)

    def predict(self, **inputs: Any) -> torch.Tensor:
        return self.transformer(**inputs).sample
