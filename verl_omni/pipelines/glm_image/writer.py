"""GLM-Image's autoregressive model, alone: how it is loaded and saved where it is trained."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.causal_lm import CausalLM
from verl_omni.pipelines.glm_image import image_tokens
from verl_omni.pipelines.model_base import DiffusionModelBase


@DiffusionModelBase.register("GlmImageForConditionalGeneration")
class ImageTokenWriter(CausalLM):
    model_types = ("glm_image",)
    drawn_by = "GlmImagePipeline"
    # How it is asked, for a rollout; the tokenizer is GLM-Image's processor.
    asked, target = staticmethod(image_tokens.asked), staticmethod(image_tokens.target)
    as_grids, positions = staticmethod(image_tokens.as_grids), staticmethod(image_tokens.positions)

    @classmethod
    def model_class(cls) -> Any:
        from transformers import GlmImageForConditionalGeneration

        return GlmImageForConditionalGeneration

    @classmethod
    def build_module(cls, model_config: DiffusionModelConfig, dtype: torch.dtype) -> torch.nn.Module:
        """It writes tokens of images and no others. What looks at images stays as it is: prompts have none."""
        model = super().build_module(model_config, dtype).requires_grad_(False)
        codes = model.config.vq_config.num_embeddings

        def without_others(head: torch.nn.Module, args: tuple, logits: torch.Tensor) -> torch.Tensor:
            others = torch.arange(logits.shape[-1], device=logits.device) >= codes
            return logits.masked_fill(others, -torch.inf)

        model.lm_head.register_forward_hook(without_others)
        for part in (model.model.language_model, model.lm_head):
            part.requires_grad_(True)
        return model

    @classmethod
    def write_part(
        cls, model_config: DiffusionModelConfig, part: torch.nn.Module, state: dict[str, torch.Tensor], folder: str
    ) -> None:
        """With what is not trained, as it lies in the model's folder."""
        whole = dict(state)
        for path in sorted(Path(model_config.path).expanduser().glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                whole |= {name: file.get_tensor(name) for name in file.keys() if name not in state}  # noqa: SIM118
        missing = sorted(dict(part.named_parameters()).keys() - whole.keys())
        if missing:
            raise ValueError(f"{model_config.path} has no {missing[0]}, of {len(missing)} tensors that are not trained")
        super().write_part(model_config, part, whole, folder)

    @classmethod
    def write_tokenizer(cls, model_config: DiffusionModelConfig, place: Path) -> None:
        """It has none: GLM-Image's folder has a processor beside it."""
