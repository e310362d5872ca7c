"""Models of images and text (transformers' AutoModelForImageTextToText) as writers: of prompts that are text alone."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.causal_lm import CausalLM
from verl_omni.pipelines.model_base import DiffusionModelBase

IMAGE_TEXT = "AutoModelForImageTextToText"
NOT_TRAINED = ("visual", "audio_tower")
# Those whose positions, without an image, are the places of the tokens, as texts are written and replayed.
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker")


@DiffusionModelBase.register(IMAGE_TEXT)
class ImageTextLM(CausalLM):
    model_types = KINDS

    @classmethod
    def model_class(cls) -> Any:
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText

    @classmethod
    def build_module(cls, model_config: DiffusionModelConfig, dtype: torch.dtype) -> torch.nn.Module:
        """What looks at images or listens stays as it is: prompts have neither."""
        model = super().build_module(model_config, dtype)
        for name, part in model.named_modules():
            if name.rpartition(".")[2] in NOT_TRAINED:
                part.requires_grad_(False)
        return model

    @classmethod
    def write_part(
        cls, model_config: DiffusionModelConfig, part: torch.nn.Module, state: dict[str, torch.Tensor], folder: str
    ) -> None:
        """With what is not trained, by the names that transformers has for it: those in files may be older ones."""
        own = cls.model_class().from_pretrained(
            os.path.expanduser(model_config.path), dtype=next(iter(state.values())).dtype
        )
        super().write_part(model_config, part, own.state_dict() | state, folder)

    @classmethod
    def write_tokenizer(cls, model_config: DiffusionModelConfig, place: Path) -> None:
        super().write_tokenizer(model_config, place)
        for file in Path(model_config.path).expanduser().glob("*processor_config.json"):
            shutil.copyfile(file, place / file.name)
