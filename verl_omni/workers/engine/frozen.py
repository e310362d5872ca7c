"""Frozen policies that are read from a folder: a reference or teachers of the user's own.

What fits in the place of the trained weights is a copy that is swapped in (`policies.py`): an adapter beside an adapter
of the same base, a model beside a model. A whole model beside a LoRA, or one of another depth, is a module of its own.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.utils import read_component_config
from verl_omni.workers.engine import adapters
from verl_omni.workers.engine.adapters import Reader
from verl_omni.workers.engine.protocol import TrainingEngine

Stored = dict[torch.nn.Parameter, Callable[[], torch.Tensor]]
# What two transformers that see and give the same may differ in, by its names in diffusers' configs: how many blocks,
# and which of them are of which kind.
DEPTH = {
    "num_layers", "num_single_layers", "num_hidden_layers", "num_refiner_layers", "n_layers", "n_refiner_layers",
    "dit_depth", "dual_attention_layers", "layer_types",
}  # fmt: skip


def is_model(folder: Path, model: DiffusionModelConfig) -> bool:
    """Whether the folder holds all weights of a transformer."""
    return any((folder / model.transformer_subfolder).glob("*.safetensors"))


def own_config(folder: Path, model: DiffusionModelConfig) -> DiffusionModelConfig | None:
    """How the folder's model is built as a module of its own; None where it can take the trained one's place."""
    if not is_model(folder, model) or not (model.lora_rank or differences(folder, model)):
        return None
    return whole_config(folder, model)


def whole_config(folder: Path, model: DiffusionModelConfig) -> DiffusionModelConfig:
    """How a module of all weights in the folder is built."""
    return dataclasses.replace(
        model,
        lora_rank=0,
        base_precision=None,
        lora_path=None,
        target_modules=None,
        load_format="auto",
        config_path=str(folder) if differences(folder, model) else model.config_path,
    )


def differences(folder: Path, model: DiffusionModelConfig) -> dict[str, tuple[Any, Any]]:
    """What the configs of the folder's transformers have that the trained ones' have not: theirs and the trained one's.

    What a config leaves out has its class's default: older versions of diffusers know less.
    """
    found, own = {}, Path(model.config_path or model.path)
    for part in (model.transformer_subfolder, *DiffusionModelBase.get_class(model).trained_components[1:]):
        if not ((folder / part / "config.json").is_file() and (own / part / "config.json").is_file()):
            continue
        theirs, ours = (_whole_config(read_component_config(str(place), part)) for place in (folder, own))
        names = {name for name in theirs | ours if not name.startswith("_")}
        found |= {n: (theirs.get(n), ours.get(n)) for n in sorted(names) if theirs.get(n) != ours.get(n)}
    return found


def _whole_config(config: Mapping[str, Any]) -> dict[str, Any]:
    known = getattr(diffusers, config.get("_class_name", ""), None)
    if known is None:  # a class of the user's own
        return dict(config)
    told = {name: p.default for name, p in inspect.signature(known.__init__).parameters.items() if name != "self"}
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}
    return listed | dict(config)


def keep(engine: TrainingEngine, name: str, folder: str, setting: str, offload: bool = False) -> None:
    """The policy of that name, from now on."""
    place = Path(folder).expanduser()
    config = own_config(place, engine.model_config)
    if config is not None:
        engine.models[name] = built(engine, config, place, offload)
        return
    read = stored(engine.model_config, engine.parts, place, setting)
    engine.policies.keep_frozen(name, {n: read[p] for n, p in engine.parameters.items()}, offload)


def built(
    like: TrainingEngine, config: DiffusionModelConfig, folder: Path, offload: bool = False
) -> TrainingEngine:
    """An engine that is only ever asked, laid out as the other one, in the dtype that it computes in."""
    common = dataclasses.replace(
        like.common,
        model_dtype=str(like.dtype).removeprefix("torch."),
        compile_ahead=False,
        fold_lora=None,
        param_offload=like.common.param_offload or offload,
    )
    engine = type(like)(
        config, like.engine_config, like.optimizer_config, like.checkpoint_config, like.replay_class, common
    )
    engine.weights_from = str(folder)
    engine.initialize()
    engine.module.eval()
    return engine


@contextlib.contextmanager
def standing_in(engine: TrainingEngine, other: TrainingEngine) -> Iterator[None]:
    """Forward passes of `engine` inside go through the other's module."""
    own = engine.module
    with contextlib.nullcontext() if other is engine else other.eval_mode():
        engine.module = other.module
        try:
            yield
        finally:
            engine.module = own
            other.settle()


def stored(model: DiffusionModelConfig, parts: Mapping[str, torch.nn.Module], folder: Path, setting: str) -> Stored:
    """For each trained parameter what reads its value in that folder, or one line that says what does not fit."""
    lora, found = model.lora_rank > 0, {}
    for part_name, part in parts.items():
        places = {name.replace(".default.", ".") if lora else name: name for name in part.state_dict()}
        trained = {
            name.replace(".default.", ".") if lora else name: parameter
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        if lora:
            shapes, read = adapters.reader(model, folder, parts, part_name, setting)
        else:
            shapes, read = _model(model, folder, part_name)
        if strange := sorted(shapes.keys() - places.keys()):
            raise ValueError(
                f"{setting}={folder} has {strange[0]} for {part_name}, which the trained model has not"
                f"{f' (or not under its target_modules): {adapters.MERGE}' if lora else ': nobody would look at it'}"
            )
        for name, parameter in trained.items():
            if shapes.get(name) != tuple(parameter.shape):
                seen = f"shape {shapes[name]}" if name in shapes else "nothing"
                raise ValueError(
                    f"{setting}={folder} has {seen} for {part_name}.{name}, and the trained model shape "
                    f"{tuple(parameter.shape)}: expected weights of the same architecture"
                )
            found[parameter] = lambda name=name, read=read: read(name)
    return found


def _model(model: DiffusionModelConfig, folder: Path, part: str) -> Reader:
    """Tensor by tensor: nobody holds the whole."""
    adapter = DiffusionModelBase.get_class(model)
    there = dataclasses.replace(model, path=str(folder), load_format="auto")
    tensors = adapter.named_tensors(there, part)
    return tensors.shapes, lambda name: tensors.read(name, ())
