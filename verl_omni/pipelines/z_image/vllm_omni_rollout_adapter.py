"""Z-Image in vLLM-Omni."""

import functools
import math
from collections.abc import Iterable
from unittest import mock

import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.z_image import pipeline_z_image
from vllm_omni.diffusion.models.z_image.z_image_transformer import SEQ_MULTI_OF
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

from verl_omni.pipelines.vllm_omni import VllmOmniPipelineBase


@VllmOmniPipelineBase.register("ZImagePipeline", algorithm="flow_grpo")
class ZImagePipelineWithLogProb(VllmOmniPipelineBase, pipeline_z_image.ZImagePipeline):
    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        """Of the size that the folder's config says: vLLM-Omni's builds the published one, whatever is there."""
        transformer = pipeline_z_image.ZImageTransformer2DModel
        sizes = get_transformer_config_kwargs(od_config.tf_model_config, transformer)
        with mock.patch.object(pipeline_z_image, "ZImageTransformer2DModel", functools.partial(transformer, **sizes)):
            super().__init__(od_config=od_config, prefix=prefix)
        self.text_encoder = self.text_encoder.model  # without the head, which a folder that diffusers wrote has not

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """A published folder has the head, and names the encoder inside of it."""
        named = ((name.replace("text_encoder.model.", "text_encoder."), tensor) for name, tensor in weights)
        return super().load_weights((n, tensor) for n, tensor in named if not n.startswith("text_encoder.lm_head."))

    def predict(self, x: list[torch.Tensor], t: torch.Tensor, cap_feats: list[torch.Tensor]) -> list[torch.Tensor]:
        """Captions of one length at a time: vLLM-Omni's attention has no mask, and positions of the first row only.

        Their length is that to which the transformer pads them.
        """
        alike: dict[int, list[int]] = {}
        for row, caption in enumerate(cap_feats):
            alike.setdefault(math.ceil(len(caption) / SEQ_MULTI_OF), []).append(row)
        found = {}
        for rows in alike.values():
            outputs = self.transformer([x[i] for i in rows], t[rows], [cap_feats[i] for i in rows])[0]
            found |= dict(zip(rows, outputs, strict=True))
        return [found[row] for row in range(len(x))]
