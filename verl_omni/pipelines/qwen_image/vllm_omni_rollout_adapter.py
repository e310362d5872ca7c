"""Qwen-Image in vLLM-Omni."""

from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline

from verl_omni.pipelines.vllm_omni import VllmOmniPipelineBase


@VllmOmniPipelineBase.register("QwenImagePipeline", algorithm="flow_grpo")
class QwenImagePipelineWithLogProb(VllmOmniPipelineBase, QwenImagePipeline):
    image_processor = VaeImageProcessor()

    def predict(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Text positions are counted over the padded width, as diffusers does: not over each prompt's own length."""
        lengths = [encoder_hidden_states.shape[1]] * len(hidden_states)
        return self.transformer(
            hidden_states=hidden_states, encoder_hidden_states=encoder_hidden_states, txt_seq_lens=lengths, **inputs
        ).sample
