"""Wan in vLLM-Omni: 2.1, and 2.2 with one transformer or two."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from diffusers.video_processor import VideoProcessor

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.vllm_omni import AsDiffusers, VllmOmniPipelineBase
from verl_omni.pipelines.wan.adapter import Wan


@contextlib.contextmanager
def without_torchvision() -> Iterator[None]:
    """vLLM-Omni imports all of Wan together, and image-to-video wants torchvision, which has no CPU build on PyPI."""
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    empty = {} if importlib.util.find_spec("torchvision") else {name: ModuleType(name) for name in names}
    for name, module in empty.items():
        sys.modules[name] = module
        above, _, last = name.rpartition(".")
        if above:
            setattr(empty[above], last, module)
    try:
        yield
    finally:
        for name in empty:
            del sys.modules[name]


with without_torchvision():
    from vllm_omni.diffusion.models.wan2_2 import Wan22Pipeline


@VllmOmniPipelineBase.register("WanPipeline", algorithm="flow_grpo")
class WanPipelineWithLogProb(VllmOmniPipelineBase, Wan22Pipeline):
    video_processor = VideoProcessor()

    def as_diffusers(self, model_config: DiffusionModelConfig) -> torch.nn.Module:
        high, *low = (view(t) for t in (self.transformer, self.transformer_2) if t is not None)
        return Wan.experts(model_config, high, *low) if low else high


def view(transformer: torch.nn.Module) -> AsDiffusers:
    def predict(**inputs: Any) -> torch.Tensor:
        return transformer(**inputs, return_dict=False)[0]

    return AsDiffusers(predict, transformer.config)
