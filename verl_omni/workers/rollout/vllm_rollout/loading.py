"""Trained weights into a pipeline of vLLM-Omni, which fuses some of them and reports nothing that it leaves out."""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.utils import read_component_config
from verl_omni.utils.json_files import read_object
from verl_omni.workers.engine.lora import add_lora, base_name, folded
from verl_omni.workers.transfer.weights import checked

Weights = Iterable[tuple[str, torch.Tensor]]
READERS = 8


class TrainedWeights:
    """Takes what training sends, by the training module's names: all of it, and each tensor has to find its place.

    LoRA is added to the folder's own weights: the layers that are fused in vLLM-Omni then need no adapters, and its
    forwards cost nothing more. The first time each tensor goes in by itself, to see that it is taken.
    """

    def __init__(self, pipeline: Any, model_config: DiffusionModelConfig, dtype: torch.dtype):
        self.pipeline, self.model_config, self.dtype = pipeline, model_config, dtype
        parts = DiffusionModelBase.get_class(model_config).trained_modules(pipeline.as_diffusers(model_config))
        self.lead = "" if len(parts) > 1 else f"{next(iter(parts))}."  # where there are several, names begin with them
        self.expected, self.frozen = trained_and_frozen(model_config, list(parts))
        self.folder: dict[str, FolderWeights | HeldWeights] = {
            part: FolderWeights(Path(model_config.path).expanduser() / part) for part in parts
        }
        self.device = next(pipeline.transformer.parameters()).device
        self._taken: set[str] = set()

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        named = checked(self._led(weights), self.expected, "no trained parameter of the rollout's model")
        self.pipeline.load_weights(self._known(self._folded(named) if self.model_config.lora_rank else named))

    @torch.no_grad()
    def load_base(self, weights: Weights) -> None:
        """Frozen weights in the place of the folder's own. They stay in CPU memory: adapters are added to them."""
        held = dict(checked(self._led(weights), self.frozen, "no frozen parameter of the rollout's model"))
        self.pipeline.load_weights(self._known(held.items()))
        self.folder = {part: HeldWeights(held, part) for part in self.folder}

    def _led(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"{self.lead}{name}", tensor) for name, tensor in weights)

    def _folded(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """W + alpha/rank B A, with W as training has it."""
        scaling, layers = self.model_config.lora_alpha / self.model_config.lora_rank, {}
        for name, tensor in weights:
            layer, _, half = name.removesuffix(".default.weight").rpartition(".")
            layers.setdefault(layer, {})[half] = tensor
        for layer, frozen in read_ahead(self._frozen, layers):
            frozen = frozen.to(self.device, non_blocking=True).to(self.dtype)
            halves = {name: half.to(self.device).float() for name, half in layers.pop(layer).items()}
            # Flat, for convolutions have adapters too.
            added = (halves["lora_B"].flatten(1) @ halves["lora_A"].flatten(1)).view_as(frozen)
            yield f"{layer}.weight", folded(frozen, added.mul_(scaling))

    def _frozen(self, layer: str) -> torch.Tensor:
        """The folder's own weight, ready to go to the device."""
        part, _, own = layer.partition(".")
        weight = self.folder[part].read(f"{own}.weight")
        return weight if self.device.type == "cpu" else weight.pin_memory()

    def _known(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that vLLM-Omni is known to take; others are tried one by one, here."""
        for name, tensor in weights:
            if name in self._taken:
                yield name, tensor
            elif any(n.split(".")[0] == name.split(".")[0] for n in self.pipeline.load_weights([(name, tensor)])):
                self._taken.add(name)
            else:
                raise KeyError(f"{type(self.pipeline).__name__} of vLLM-Omni has no place for the weights {name}")


Named = dict[str, torch.nn.Parameter]


def trained_and_frozen(model_config: DiffusionModelConfig, parts: list[str]) -> tuple[Named, Named]:
    """(what training sends, what lies frozen below a LoRA), names with the part that they belong to in front. Builds
    the modules without weights."""
    import diffusers

    modules = {}
    for part in parts:
        config = read_component_config(model_config.path, part)
        with torch.device("meta"):
            modules[part] = getattr(diffusers, config["_class_name"]).from_config(dict(config))
            if model_config.lora_rank:
                add_lora({part: modules[part]}, model_config, DiffusionModelBase.get_class(model_config))
    named = [(f"{part}.{name}", p) for part, module in modules.items() for name, p in module.named_parameters()]
    frozen = {base_name(name): parameter for name, parameter in named if not parameter.requires_grad}
    return {name: parameter for name, parameter in named if parameter.requires_grad}, frozen


class FolderWeights:
    """Single tensors of a component of a diffusers folder, read when they are looked at. Nobody may write into them."""

    def __init__(self, folder: Path):
        self.folder, self.single = folder, "diffusion_pytorch_model.safetensors"
        index = folder / f"{self.single}.index.json"
        self.files = read_object(index)["weight_map"] if index.is_file() else {}

    def read(self, name: str) -> torch.Tensor:
        return self._opened(self.files.get(name, self.single)).get_tensor(name)

    @functools.cache  # noqa: B019  (as long as the engine; opening one reads the names of all its tensors)
    def _opened(self, file: str) -> Any:
        return safe_open(self.folder / file, "pt")


class HeldWeights:
    """The same, of weights that were sent."""

    def __init__(self, weights: dict[str, torch.Tensor], part: str):
        self.weights, self.part = weights, part

    def read(self, name: str) -> torch.Tensor:
        return self.weights[f"{self.part}.{name}"]


def read_ahead(read: Callable[[str], torch.Tensor], names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, what `read` gives for it), in this order. One thread alone does not fill the way to a GPU."""
    with ThreadPoolExecutor(READERS) as readers:
        coming: deque = deque()
        for name in list(names):
            coming.append((name, readers.submit(read, name)))
            if len(coming) > READERS:
                name, future = coming.popleft()
                yield name, future.result()
        for name, future in coming:
            yield name, future.result()
