"""Images of a model, with what a run has trained, as its validation draws them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from verl_omni.algorithms.registry import fill_nulls
from verl_omni.cli.trained import FULL_FILES, LORA_FILE, Weights, drawing_settings
from verl_omni.config import DiffusionModelConfig, DiffusionPipelineConfig, DiffusionRolloutAlgoConfig
from verl_omni.pipelines.drawing import Drawer, Request
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.model_folder import check_model_folder
from verl_omni.pipelines.settings import check_size
from verl_omni.pipelines.utils import lora_files
from verl_omni.utils.suggest import unknown

if TYPE_CHECKING:
    from PIL.Image import Image


class Painter:
    """`given` are fields of `rollout.pipeline`: they come before the run's own settings, and those before defaults."""

    def __init__(self, weights: Weights, given: Mapping[str, Any], device: str | None = None):
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        known = {f.name for f in fields(DiffusionPipelineConfig)}
        for name in given:
            if name not in known:
                raise ValueError(unknown("setting of a drawing", name, known))
        self.config = self._model_config(weights, {**drawing_settings(weights), **given})
        self.adapter = DiffusionModelBase.get_class(self.config)
        if (kind := self.adapter.makes(self.config)) not in ("image", "video"):
            raise ValueError(
                f"{weights.model} makes {kind}, and this command draws pictures: what a run has made is in "
                "validation/ of its folder, and in its report"
            )
        if weights.setting("actor_rollout_ref.rewriter.path"):
            print(f"{weights.name}: a rewriter wrote this run's prompts; here they are drawn as given", file=sys.stderr)
        check_size("--set ", self.config.pipeline, self.config)
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        module = self.adapter.load_module(self.config, dtype)
        load_trained(weights, self.config.architecture, self.adapter.trained_modules(module))
        pipe = self.adapter.load_pipeline(self.config, self.device, dtype)
        self.drawer = Drawer(self.config, pipe, module.to(self.device).eval(), self.device)
        self.tokenizers = self.adapter.load_tokenizers(self.config)

    def _model_config(self, weights: Weights, settings: dict[str, Any]) -> DiffusionModelConfig:
        pipeline = DiffusionPipelineConfig(**settings)
        algo = DiffusionRolloutAlgoConfig(
            noise_level=0.0, sde_type=weights.setting("actor_rollout_ref.rollout.algo.sde_type", "ode")
        )
        named = weights.setting("actor_rollout_ref.model.architecture")  # the folder may name another, as Wan2.2-TI2V's
        config = DiffusionModelConfig(path=str(weights.model), architecture=named, pipeline=pipeline, algo=algo)
        check_model_folder(config)
        adapter = DiffusionModelBase.get_class(config)
        whose = f"the pipeline defaults of {adapter.__name__}"
        return replace(config, pipeline=fill_nulls(pipeline, adapter.pipeline_defaults, whose))

    def draw(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        negatives: Sequence[str] | None = None,
        images: "Sequence[list[Image] | None] | None" = None,
    ) -> list[torch.Tensor]:
        """One for each prompt and its seed, uint8: (3, H, W), of a video (F, 3, H, W)."""
        size = self.config.pipeline
        requests = []
        for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            shown = images[i] if images else None
            if shown and not self.adapter.images_of_a_prompt(self.config)[1]:
                raise ValueError(
                    f"{self.config.architecture} draws from prompts alone, and a prompt has images: leave them out"
                )
            negative = (negatives[i] if negatives else "") or size.negative_prompt
            limit = size.max_sequence_length
            ids = self.adapter.tokenize(self.tokenizers, prompt, limit, shown)
            away = self.adapter.tokenize_negative(self.tokenizers, negative, limit, shown)
            requests.append(Request(ids, away, shown, {"seed": seed}))
        return [sample.response for sample in self.drawer.draw(requests)]


def load_trained(weights: Weights, architecture: str, parts: Mapping[str, torch.nn.Module]) -> None:
    """What was exported, into the models of a pipeline that were trained."""
    if weights.export is None:
        return
    if not weights.is_lora:
        from safetensors.torch import load_file

        for name, part in parts.items():
            files = sorted((weights.export / name).glob(FULL_FILES))
            part.load_state_dict({key: value for file in files for key, value in load_file(file).items()})
        return
    for number, (name, part) in enumerate(parts.items()):
        folder = weights.export / name if number else weights.export  # as the export lays them out
        state, metadata = lora_state(folder, architecture)
        part.load_lora_adapter(state, prefix="transformer", metadata=metadata)


def lora_state(folder: Any, architecture: str) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """The tensors of a LoRA file in diffusers' own keys, and the rank and alpha that it was made with."""
    *found, metadata = lora_files(architecture).lora_state_dict(
        str(folder), weight_name=LORA_FILE, use_safetensors=True, return_lora_metadata=True
    )
    return found[0], metadata
