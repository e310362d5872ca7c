"""Stable Diffusion 3 and 3.5 in vLLM-Omni."""

from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from vllm_omni.diffusion.models.sd3 import StableDiffusion3Pipeline

from verl_omni.pipelines.vllm_omni import VllmOmniPipelineBase


@VllmOmniPipelineBase.register("StableDiffusion3Pipeline", algorithm="flow_grpo")
class StableDiffusion3PipelineWithLogProb(VllmOmniPipelineBase, StableDiffusion3Pipeline):
    def prepare_latents(
        self,
        batch_size: int,
        channels: int,
        height: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        generators: list[torch.Generator],
    ) -> torch.Tensor:
        """With diffusers' arguments: vLLM-Omni's would draw in the dtype of the model."""
        factor = self.vae_scale_factor
        shape = (batch_size, channels, height // factor, width // factor)
        return randn_tensor(shape, generators, device, dtype)

    def predict(self, **inputs: Any) -> torch.Tensor:
        return self.transformer(**inputs).sample
