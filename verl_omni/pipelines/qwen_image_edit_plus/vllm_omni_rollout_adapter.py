"""Qwen-Image-Edit (2509 and later) in vLLM-Omni."""

from unittest import mock

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.qwen_image import pipeline_qwen_image_edit_plus

from verl_omni.pipelines.qwen_image.vllm_omni_rollout_adapter import QwenImagePipelineWithLogProb
from verl_omni.pipelines.vision_processor import image_text_processor
from verl_omni.pipelines.vllm_omni import VllmOmniPipelineBase


@VllmOmniPipelineBase.register("QwenImageEditPlusPipeline", algorithm="flow_grpo")
class QwenImageEditPlusPipelineWithLogProb(
    VllmOmniPipelineBase, pipeline_qwen_image_edit_plus.QwenImageEditPlusPipeline
):
    predict = QwenImagePipelineWithLogProb.predict  # the same transformer

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        """With the processor that tokenized the prompts: vLLM-Omni's has a video half, which wants torchvision."""
        with mock.patch.object(pipeline_qwen_image_edit_plus, "Qwen2VLProcessor", image_text_processor()):
            super().__init__(od_config=od_config, prefix=prefix)
