"""LTX-2 in vLLM-Omni, text to video with sound."""

from types import SimpleNamespace
from typing import Any

import torch
from diffusers import LTX2Pipeline as Diffusers
from vllm_omni.diffusion.models.ltx2 import LTX2Pipeline

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.ltx2.adapter import LTX2
from verl_omni.pipelines.vllm_omni import AsDiffusers, VllmOmniPipelineBase


class BothAsDiffusers(AsDiffusers):
    """Diffusers' transformer returns video and sound."""

    def forward(self, return_dict: bool = False, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.predict(**inputs)


@VllmOmniPipelineBase.register("LTX2Pipeline", algorithm="flow_grpo")
class LTX2PipelineWithLogProb(VllmOmniPipelineBase, LTX2Pipeline):
    """Latents are packed and scaled by diffusers' own methods: vLLM-Omni has them as functions of other names."""

    _pack_latents = staticmethod(Diffusers._pack_latents)
    _unpack_latents = staticmethod(Diffusers._unpack_latents)
    _denormalize_latents = staticmethod(Diffusers._denormalize_latents)
    _pack_audio_latents = staticmethod(Diffusers._pack_audio_latents)
    _unpack_audio_latents = staticmethod(Diffusers._unpack_audio_latents)
    _denormalize_audio_latents = staticmethod(Diffusers._denormalize_audio_latents)

    def as_diffusers(self, model_config: DiffusionModelConfig) -> torch.nn.Module:
        # vLLM-Omni's transformer keeps a part of its config, and a folder of LTX-2 may lack what 2.3 has brought.
        said = {"cross_attn_mod": False, "audio_cross_attn_mod": False} | dict(LTX2.transformer_config(model_config))
        view = BothAsDiffusers(self.predict, SimpleNamespace(**said))
        view.rope, view.audio_rope = self.transformer.rope, self.transformer.audio_rope
        return view

    def predict(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transformer(**inputs, return_dict=False)
