"""A module is built without its weights, spread over ranks, and then filled: each rank reads what it holds.

Neither host nor device ever has the whole of a model that several ranks share.
"""

import contextlib
import functools
import inspect
import math
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl_omni.pipelines.utils import read_component_config, read_index
from verl_omni.utils.json_files import read_object
from verl_omni.utils.model_code import refuse_code

Region = tuple[slice, ...]
WEIGHTS = "diffusion_pytorch_model.safetensors"  # as diffusers calls the file, or with .index.json those of several


class NamedTensors(Protocol):
    """The tensors of one model by their names, each read when it is asked for."""

    #: for messages
    where: str
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, region: Region) -> torch.Tensor:
        """This part of it, in the dtype that it is stored in."""


class FolderTensors:
    """Those of a component of a diffusers folder, in one file or several; of another library by its name for them."""

    def __init__(self, folder: str, file: str = WEIGHTS):
        refuse_code(folder)
        self.where = folder
        index = Path(folder, f"{file}.index.json")
        names = sorted(set(read_object(index)["weight_map"].values())) if index.is_file() else [file]
        self._files, self.shapes = {}, {}
        for path in (os.path.join(folder, name) for name in names):
            with safe_open(path, "pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            self.shapes |= found
            self._files |= dict.fromkeys(found, path)

    def read(self, name: str, region: Region) -> torch.Tensor:
        # Opened for each: what has been read of an open file counts as this process's memory.
        with safe_open(self._files[name], "pt") as file:
            return file.get_slice(name)[region] if region else file.get_tensor(name)


class RandomTensors:
    """Numbers in the place of a model's weights: of a name always the same, on one rank and on many.

    Drawn in bfloat16 whatever they are held in, so that two of different dtypes have the same; where they will be used,
    which takes seconds even for billions.
    """

    def __init__(self, model: torch.nn.Module):
        self.where, self._model = "random weights", model.state_dict()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._model.items()}

    def read(self, name: str, region: Region) -> torch.Tensor:
        if not self._model[name].is_meta:  # a table
            return self._model[name][region]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        whole = torch.empty(self.shapes[name], dtype=torch.bfloat16, device=device)
        if whole.ndim < 2 and not name.endswith("bias"):  # of a norm
            return whole.fill_(1.0)[region]
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        bound = 1 / math.sqrt(whole[0].numel()) if whole.ndim > 1 else 0.02
        return whole.uniform_(-bound, bound, generator=generator)[region]


def build_component(model_config: Any, name: str, dtype: torch.dtype) -> torch.nn.Module:
    """One model of a diffusers folder, by the class that its config names: its weights are on the meta device.

    As diffusers itself begins: what is computed and not read, such as tables of positions, is there and has values.
    """
    import diffusers
    from diffusers.models.modeling_utils import no_init_weights

    config = read_component_config(model_config.config_path or model_config.path, name)
    cls = getattr(diffusers, config["_class_name"], None)
    if cls is None:  # some are in the module of a pipeline only
        library, _ = read_index(os.path.expanduser(model_config.path))[name]
        cls = getattr(getattr(diffusers.pipelines, library), config["_class_name"])
    with no_init_weights(), default_dtype(dtype), parameters_on_meta():
        model = cls.from_config(dict(config))
    kept = cls._keep_in_fp32_modules or ()
    for parameter_name, parameter in model.named_parameters():
        if not set(kept).isdisjoint(parameter_name.split(".")):
            parameter.data = parameter.data.float()
    model.register_to_config(_name_or_path=os.path.expanduser(model_config.path))
    return model.eval().requires_grad_(True)


def component_tensors(model_config: Any, name: str) -> NamedTensors:
    """What `build_component` leaves to be filled."""
    if model_config.load_format == "dummy":
        return RandomTensors(build_component(model_config, name, torch.bfloat16))
    return FolderTensors(os.path.join(os.path.expanduser(model_config.path), name))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Every parameter that a module gets inside has a shape and a dtype and no memory. Shared ones stay shared.

    Linear layers ask for none at all: what they would give back at once adds up to more than a machine may have.
    """
    register, linear = torch.nn.Module.register_parameter, torch.nn.Linear.__init__
    signature = inspect.signature(linear)

    @functools.wraps(register)
    def without_memory(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    @functools.wraps(linear)
    def on_meta(module: torch.nn.Linear, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(module, *args, **kwargs)
        given.arguments["device"] = given.arguments.get("device") or "meta"
        linear(*given.args, **given.kwargs)

    torch.nn.Module.register_parameter, torch.nn.Linear.__init__ = without_memory, on_meta
    try:
        yield
    finally:
        torch.nn.Module.register_parameter, torch.nn.Linear.__init__ = register, linear


@torch.no_grad()
def fill(
    model: torch.nn.Module,
    tensors: NamedTensors,
    device: torch.device | str,
    dtype: torch.dtype,
    stored_name: Callable[[str], str] = str,
    receivers: Mapping[torch.nn.Parameter, Callable[[torch.Tensor], None] | None] | None = None,
) -> None:
    """Give what is on the meta device memory on `device` and its values, of each tensor the part that this rank holds.

    `stored_name` says how a tensor of the model is called where it is stored. Parameters keep the dtype that they were
    built in; of tables that are stored too, `dtype` is what they are held in. `receivers` take what is read for
    parameters that are held in another form; None where that comes with another's.
    """
    receivers = receivers or {}
    places: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta and receivers.get(parameter, parameter) is not None:
            places.setdefault(parameter, []).append(stored_name(name))
    if not places:  # an adapter that loads its module whole
        return
    chosen = {p: next((n for n in names if n in tensors.shapes), None) for p, names in places.items()}
    tables = dict(_stored_tables(model, tensors, stored_name))
    _check(model, tensors, places, chosen, tables)
    _give_memory(model, device)
    for parameter, name in chosen.items():
        own, region = (parameter.to_local(), _region(parameter)) if isinstance(parameter, DTensor) else (parameter, ())
        if own.numel():
            value = tensors.read(name, region).to(own.device)  # first, for a GPU rounds faster than a CPU
            receivers.get(parameter, own.copy_)(value)
    for name, (holder, key) in tables.items():
        before = holder._buffers[key]
        value = tensors.read(name, ())
        holder._buffers[key] = value.to(before.device, dtype if value.is_floating_point() else None)


def _region(parameter: DTensor) -> Region:
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def _stored_tables(
    model: torch.nn.Module, tensors: NamedTensors, stored_name: Callable[[str], str]
) -> Iterator[tuple[str, tuple[torch.nn.Module, str]]]:
    """Buffers that belong to the weights and are stored with them: where each is held."""
    for path, holder in model.named_modules():
        for key in holder._buffers.keys() - holder._non_persistent_buffers_set:
            name = stored_name(f"{path}.{key}" if path else key)
            if name in tensors.shapes:
                yield name, (holder, key)


def _give_memory(model: torch.nn.Module, device: torch.device | str) -> None:
    """In place: who holds a parameter goes on holding it, and shared ones stay shared."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def _check(
    model: torch.nn.Module,
    tensors: NamedTensors,
    places: dict[torch.nn.Parameter, list[str]],
    chosen: dict[torch.nn.Parameter, str | None],
    tables: dict[str, Any],
) -> None:
    """All that is needed is there in its shape: diffusers would leave what is missing random."""
    missing = [names[0] for parameter, names in places.items() if chosen[parameter] is None]
    asked = f"{tensors.where}: its config.json asks for"
    another = "is the config that of another size of the model?"
    if missing:
        raise ValueError(
            f"{asked} {len(missing)} tensors that its weights do not have, such as {min(missing)}: {another}"
        )
    for parameter, name in chosen.items():
        if tensors.shapes[name] != tuple(parameter.shape):
            raise ValueError(
                f"{asked} {name} of shape {tuple(parameter.shape)}, and its weights have "
                f"{tensors.shapes[name]}: {another}"
            )
    known = {name for names in places.values() for name in names} | tables.keys()
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    left = [n for n in tensors.shapes if n not in known and not any(re.search(pattern, n) for pattern in ignored)]
    if left:
        warnings.warn(
            f"{tensors.where} holds {len(left)} tensors that a {type(model).__name__} has no place for, such as "
            f"{min(left)}",
            stacklevel=3,
        )
