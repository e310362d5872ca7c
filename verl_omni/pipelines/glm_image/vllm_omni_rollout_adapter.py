"""GLM-Image in vLLM-Omni: its decoder. The tokens before it are written by transformers, as in the other engine."""

import os
from typing import Any

import torch
from diffusers import AutoencoderKL
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor, T5EncoderModel
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.glm_image import GlmImagePipeline

from verl_omni.pipelines.vllm_omni import VllmOmniPipelineBase


@VllmOmniPipelineBase.register("GlmImagePipeline", algorithm="flow_grpo")
class GlmImagePipelineWithLogProb(VllmOmniPipelineBase, GlmImagePipeline):
    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        super().__init__(od_config=od_config, prefix=prefix)
        folder, dtype = od_config.model, od_config.dtype
        if dtype != torch.bfloat16:  # which vLLM-Omni loads these in, whatever it is asked for
            self.text_encoder = self._loaded(T5EncoderModel, "text_encoder", dtype=dtype)
            self.vae = self._loaded(AutoencoderKL, "vae", torch_dtype=dtype)
        self.processor = GlmImageProcessor.from_pretrained(os.path.join(folder, "processor"))
        # No part of what vLLM-Omni loads and moves.
        self.__dict__["vision_language_encoder"] = self._loaded(
            GlmImageForConditionalGeneration, "vision_language_encoder", dtype=dtype
        )

    def _loaded(self, cls: type, part: str, **dtype: torch.dtype) -> torch.nn.Module:
        folder = os.path.join(self.od_config.model, part)
        return cls.from_pretrained(folder, use_safetensors=True, **dtype).to(self.device).eval()

    def predict(self, **inputs: Any) -> torch.Tensor:
        return self.transformer(**inputs, return_dict=False)[0]
