"""What a model makes, with what a run has trained, as its validation draws: images, videos, sounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from verl_omni.algorithms.registry import fill_nulls
from verl_omni.cli.trained import FULL_FILES, LORA_FILE, Weights, drawing_settings
from verl_omni.cli.writer import Writer, Written
from verl_omni.config import DiffusionModelConfig, DiffusionPipelineConfig, DiffusionRolloutAlgoConfig
from verl_omni.pipelines.drawing import Drawer, Request
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.model_folder import check_model_folder
from verl_omni.pipelines.settings import check_size
from verl_omni.pipelines.utils import lora_files
from verl_omni.utils.responses import KINDS, Response, check_package
from verl_omni.utils.suggest import unknown

if TYPE_CHECKING:
    from PIL.Image import Image


class Drawn(NamedTuple):
    response: Response
    told: dict[str, str]  # what a rewriter wrote, as in a run's samples.jsonl


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
        self.kind = KINDS[self.adapter.makes(self.config)]
        check_package(self.kind)
        check_size("--set ", self.config.pipeline, self.config)
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        module = self.adapter.load_module(self.config, dtype)
        load_trained(weights, self.config.architecture, self.adapter.trained_modules(module))
        pipe = self.adapter.load_pipeline(self.config, self.device, dtype)
        self.drawer = Drawer(self.config, pipe, module.to(self.device).eval(), self.device)
        self.tokenizers = self.adapter.load_tokenizers(self.config)
        self.writer = Writer.of(weights, self.device, dtype, self.tokenizers)

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
        sizes: Sequence[Mapping[str, int | float]] | None = None,
    ) -> list[Drawn]:
        """One for each prompt and its seed. Pixels are uint8: (3, H, W), of a video's frames (F, 3, H, W).

        `sizes` are of prompts that ask for one of their own, such as {"height": 64}.
        """
        size = self.config.pipeline
        shown = images or [None] * len(prompts)
        if any(shown) and not self.adapter.images_of_a_prompt(self.config)[1]:
            raise ValueError(
                f"{self.config.architecture} draws from prompts alone, and a prompt has images: leave them out"
            )
        own = sizes or [{}] * len(prompts)
        written = [Written(prompt, {}) for prompt in prompts]
        if self.writer is not None:
            asked = [(one.get("height", size.height), one.get("width", size.width)) for one in own]
            written = self.writer.write(prompts, seeds, [self._reads(seen) for seen in shown], asked)
        requests = []
        for i, ((text, _, tokens), seed) in enumerate(zip(written, seeds, strict=True)):
            negative = (negatives[i] if negatives else "") or size.negative_prompt
            ids = self._reads(shown[i])(text)
            away = self.adapter.tokenize_negative(self.tokenizers, negative, size.max_sequence_length, shown[i])
            requests.append(Request(ids, away, shown[i], {"seed": seed, "written": tokens, **own[i]}))
        alike: dict[tuple, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(request.kind, []).append(i)
        drawn: dict[int, Response] = {}
        for places in alike.values():
            samples = self.drawer.draw([requests[i] for i in places])
            drawn |= {i: sample.response for i, sample in zip(places, samples, strict=True)}
        return [Drawn(drawn[i], one.told) for i, one in enumerate(written)]

    def check_size(self, prompt: str, size: Mapping[str, int | float]) -> None:
        """The model can draw what this prompt asks for."""
        from verl_omni.trainer.checks.preflight import check_row_size

        if size:
            check_row_size(f'the prompt "{prompt[:60]}"', replace(self.config.pipeline, **size), self.config)

    def _reads(self, images: "list[Image] | None") -> Callable[[str], list[int]]:
        limit = self.config.pipeline.max_sequence_length
        return lambda text: self.adapter.tokenize(self.tokenizers, text, limit, images)


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
