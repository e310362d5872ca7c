"""Rollout adapters are found by architecture and algorithm, and at the address that documents name."""

import importlib

import pytest
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline

from verl_omni.pipelines.model_base import VllmOmniPipelineBase

FOLDERS = {
    "FluxPipeline": "flux",
    "Flux2Pipeline": "flux2",
    "Flux2KleinPipeline": "flux2",
    "QwenImagePipeline": "qwen_image",
    "QwenImageEditPlusPipeline": "qwen_image_edit_plus",
    "StableDiffusion3Pipeline": "sd3",
    "WanPipeline": "wan",
    "ZImagePipeline": "z_image",
}


@pytest.mark.parametrize("architecture", FOLDERS)
def test_an_adapter_is_at_its_documented_address(architecture):
    folder, name = FOLDERS[architecture], f"{architecture}WithLogProb"
    documented = importlib.import_module(f"verl_omni.pipelines.{folder}_flow_grpo.vllm_omni_rollout_adapter")
    for algorithm in ("flow_grpo", "mix_grpo", "diffusion_nft"):
        assert VllmOmniPipelineBase.get_class(architecture, algorithm) is getattr(documented, name)


def test_an_algorithm_may_have_an_adapter_of_its_own(monkeypatch):
    """As the guide to a new algorithm has it: a subclass under that algorithm's name."""
    from verl_omni.pipelines.adapter_registry import AdapterRegistry
    from verl_omni.pipelines.qwen_image_flow_grpo.vllm_omni_rollout_adapter import QwenImagePipelineWithLogProb

    monkeypatch.setattr(VllmOmniPipelineBase, "registry", AdapterRegistry("vLLM-Omni rollout"))
    VllmOmniPipelineBase.register("QwenImagePipeline", algorithm="flow_grpo")(QwenImagePipelineWithLogProb)

    @VllmOmniPipelineBase.register("QwenImagePipeline", algorithm="dance_grpo")
    class Mine(QwenImagePipelineWithLogProb):
        pass

    assert VllmOmniPipelineBase.get_class("QwenImagePipeline", "dance_grpo") is Mine
    assert VllmOmniPipelineBase.get_class("QwenImagePipeline", "mix_grpo") is QwenImagePipelineWithLogProb
    assert issubclass(Mine, QwenImagePipeline)
