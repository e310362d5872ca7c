"""Trained weights into a pipeline of vLLM-Omni, which fuses some of them and reports nothing that it leaves out."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.utils import read_component_config
from verl_omni.utils.json_files import read_object
from verl_omni.workers.engine.lora import add_lora

Weights = Iterable[tuple[str, torch.Tensor]]


class TrainedWeights:
    """Takes what training sends, by the training module's names: all of it, and each tensor has to find its place.

    LoRA is added to the folder's own weights: the layers that are fused in vLLM-Omni then need no adapters, and its
    forwards cost nothing more. The first time each tensor goes in by itself, to see that it is taken.
    """

    def __init__(self, pipeline: Any, model_config: DiffusionModelConfig):
        self.pipeline, self.model_config = pipeline, model_config
        parts = DiffusionModelBase.get_class(model_config).trained_modules(pipeline.as_diffusers(model_config))
        self.lead = "" if len(parts) > 1 else f"{next(iter(parts))}."  # where there are several, names begin with them
        self.expected = trained_names(model_config, list(parts))
        self.folder = {part: FolderWeights(Path(model_config.path).expanduser() / part) for part in parts}
        self.device = next(pipeline.transformer.parameters()).device
        self._taken: set[str] = set()

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        named = self._checked((f"{self.lead}{name}", tensor) for name, tensor in weights)
        self.pipeline.load_weights(self._known(self._folded(named) if self.model_config.lora_rank else named))

    def _checked(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        missing = dict.fromkeys(self.expected)
        for name, tensor in weights:
            if name not in self.expected:
                raise KeyError(f"weights for {name}, which is no trained parameter of the rollout's model")
            missing.pop(name, None)
            yield name, tensor
        if missing:
            raise KeyError(
                f"{len(missing)} of {len(self.expected)} weights did not arrive, such as {next(iter(missing))}"
            )

    def _folded(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """W + alpha/rank B A, as soon as both halves are there."""
        scaling, waiting = self.model_config.lora_alpha / self.model_config.lora_rank, {}
        for name, tensor in weights:
            layer, _, half = name.removesuffix(".default.weight").rpartition(".")
            waiting.setdefault(layer, {})[half] = tensor.to(self.device).float()
            if len(waiting[layer]) == 2:
                halves = waiting.pop(layer)
                part, _, own = layer.partition(".")
                frozen = self.folder[part].read(f"{own}.weight").to(self.device).float()
                # Flat, for convolutions have adapters too.
                added = (halves["lora_B"].flatten(1) @ halves["lora_A"].flatten(1)).view_as(frozen)
                yield f"{layer}.weight", frozen.add_(added, alpha=scaling)

    def _known(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that vLLM-Omni is known to take; others are tried one by one, here."""
        for name, tensor in weights:
            if name in self._taken:
                yield name, tensor
            elif any(n.split(".")[0] == name.split(".")[0] for n in self.pipeline.load_weights([(name, tensor)])):
                self._taken.add(name)
            else:
                raise KeyError(f"{type(self.pipeline).__name__} of vLLM-Omni has no place for the weights {name}")


def trained_names(model_config: DiffusionModelConfig, parts: list[str]) -> dict[str, torch.nn.Parameter]:
    """What training sends, each with the part that it belongs to in front. Builds the modules without weights."""
    import diffusers

    modules = {}
    for part in parts:
        config = read_component_config(model_config.path, part)
        with torch.device("meta"):
            modules[part] = getattr(diffusers, config["_class_name"]).from_config(dict(config))
            if model_config.lora_rank:
                add_lora({part: modules[part]}, model_config, DiffusionModelBase.get_class(model_config))
    named = ((f"{part}.{name}", p) for part, module in modules.items() for name, p in module.named_parameters())
    return {name: parameter for name, parameter in named if parameter.requires_grad}


class FolderWeights:
    """Single tensors of a component of a diffusers folder, read when they are asked for."""

    def __init__(self, folder: Path):
        self.folder, self.single = folder, "diffusion_pytorch_model.safetensors"
        index = folder / f"{self.single}.index.json"
        self.files = read_object(index)["weight_map"] if index.is_file() else {}

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.folder / self.files.get(name, self.single), "pt") as tensors:
            return tensors.get_tensor(name)
