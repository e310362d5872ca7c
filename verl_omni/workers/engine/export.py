"""Trained weights as files that diffusers loads, and LoRA files to start from."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.utils import lora_files
from verl_omni.utils.file_mode import share, share_file
from verl_omni.workers.engine.patience import meet

# What diffusers calls them, and its own limit for the size of one.
LORA_FILE, FULL_FILE = "pytorch_lora_weights.safetensors", "diffusion_pytorch_model.safetensors"
FILE_BYTES = 10 * 10**9


class HasWeights(Protocol):
    """What an export asks of an engine."""

    model_config: DiffusionModelConfig
    adapter: type[DiffusionModelBase]
    parts: dict[str, torch.nn.Module]
    ema_decay: float | None

    def policy(self, name: str) -> AbstractContextManager[None]:
        """In here the weights are those of that policy."""


def export(engine: HasWeights, folder: str, submit: Callable[..., Future] | None = None) -> list[Future]:
    """LoRA: a folder for `pipe.load_lora_weights(folder)`. Full: one diffusers model folder for each trained part.

    With a moving average, that is what is exported: it is what validation has seen. `submit` takes the writing of large
    files upon it, of which it gives a future each.
    """
    with engine.policy("ema" if engine.ema_decay else "current"):
        if engine.model_config.lora_rank > 0:
            _write_lora(engine, folder)
            return []
        if engine.adapter.brings("write_part"):
            _write_otherwise(engine, folder)
            return []
        return _write_full(engine, folder, submit)


def lora_folder(folder: str, parts: Mapping[str, torch.nn.Module], name: str) -> str:
    """diffusers reads one LoRA file for one transformer: the first part's lies in `folder`, another's below it.

    `pipe.load_lora_weights(f"{folder}/transformer_2", load_into_transformer_2=True)` loads Wan2.2's second.
    """
    return folder if name == next(iter(parts)) else os.path.join(folder, name)


def _write_lora(engine: HasWeights, folder: str) -> None:
    """By the first rank: an adapter is small."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    states = {name: get_model_state_dict(part, options=options) for name, part in engine.parts.items()}
    if dist.get_rank() != 0:
        return
    os.makedirs(folder, exist_ok=True)
    for name, state in states.items():
        # peft puts the adapter's name into the key; diffusers' files do not have it. Buffers are the base model's.
        lora = {k.replace(".default.", "."): v.contiguous() for k, v in state.items() if ".lora_" in k}
        told = engine.parts[name].peft_config["default"].to_dict()
        target = lora_folder(folder, engine.parts, name)
        lora_files(engine.model_config.architecture).save_lora_weights(
            target,
            transformer_lora_layers=lora,
            # A set has another order in every process.
            transformer_lora_adapter_metadata={k: sorted(v) if isinstance(v, set) else v for k, v in told.items()},
        )
        order_metadata(os.path.join(target, LORA_FILE))
    share(folder)


def order_metadata(path: str) -> None:
    """safetensors writes its metadata in an order of chance: identical runs are to leave identical files."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        if len(ordered) != length:  # what follows would have to move
            raise ValueError(f"{path}: its header cannot be written again in the same place")
        file.seek(8)
        file.write(ordered)


def _write_full(engine: HasWeights, folder: str, submit: Callable[..., Future] | None) -> list[Future]:
    """By all ranks, a file each at a time: none holds more than its part of the model and the file that it writes.

    One that cannot write goes on gathering, which the others wait for.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    left: list[Future] = []
    errors: list[Exception] = []
    for name, part in engine.parts.items():
        target = os.path.join(folder, name)
        state = get_model_state_dict(part, options=StateDictOptions(ignore_frozen_params=True))  # each rank's own part
        files = files_of(state, FILE_BYTES)
        with _kept(errors):
            os.makedirs(target, exist_ok=True)
            if rank == 0:
                _write_heads(part, state, files, target)
        for first in range(0, len(files), ranks):  # a file for each rank: they write at the same time
            if first and submit is None:
                meet()
            mine: dict[str, torch.Tensor] = {}
            for number, keys in enumerate(list(files.values())[first : first + ranks]):
                for key in keys:  # all ranks gather it, and one of them keeps a copy
                    whole = gathered(state[key])
                    if number == rank and not errors:
                        mine[key] = whole.detach().to("cpu", copy=True).contiguous()
            if mine:
                path = os.path.join(target, list(files)[first + rank])
                with _kept(errors):
                    if submit is None:
                        _write_file(mine, path)
                    else:
                        left.append(submit(_write_file, mine, path))
    if submit is None:
        meet()
    if errors:
        futures.wait(left)  # nothing is written behind an error
        raise errors[0]
    return left


@contextmanager
def _kept(errors: list[Exception]) -> Iterator[None]:
    """For the end."""
    try:
        yield
    except Exception as error:
        errors.append(error)


def _write_otherwise(engine: HasWeights, folder: str) -> None:
    """By the first rank, as an adapter says whose model is none of diffusers'."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    states = {name: get_model_state_dict(part, options=options) for name, part in engine.parts.items()}
    try:
        if dist.get_rank() == 0:
            os.makedirs(folder, exist_ok=True)
            for name, state in states.items():
                engine.adapter.write_part(engine.model_config, engine.parts[name], state, os.path.join(folder, name))
            share(folder)
    finally:
        meet()


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """On the device that ranks talk over: weights may lie in CPU memory between stages."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


def _write_file(tensors: dict[str, torch.Tensor], path: str) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    share_file(Path(path))


def files_of(state: dict[str, torch.Tensor], most: int) -> dict[str, list[str]]:
    """The tensors of each file, in their order; names as diffusers has them."""
    parts: list[list[str]] = [[]]
    room = most
    for key, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and parts[-1]:
            parts.append([])
            room = most
        parts[-1].append(key)
        room -= size
    if len(parts) == 1:
        return {FULL_FILE: parts[0]}
    stem, kind = FULL_FILE.rsplit(".", 1)
    return {f"{stem}-{i:05d}-of-{len(parts):05d}.{kind}": keys for i, keys in enumerate(parts, start=1)}


def _write_heads(
    part: torch.nn.Module, state: dict[str, torch.Tensor], files: dict[str, list[str]], target: str
) -> None:
    """The model's config and, where there are several files, which tensor is in which."""
    part.save_config(target)
    config = Path(target, "config.json")
    told = json.loads(config.read_text())
    if told["_class_name"] != (name := told["_class_name"].removeprefix("FSDP")):  # of a part that ranks share
        config.write_text(json.dumps(told | {"_class_name": name}, indent=2, sort_keys=True) + "\n")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(t.numel() * t.element_size() for t in state.values())},
            "weight_map": {key: file for file, keys in files.items() for key in keys},
        }
        Path(target, f"{FULL_FILE}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def read_lora(
    model_config: DiffusionModelConfig, root: str, parts: Mapping[str, torch.nn.Module], name: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The LoRA weights of one part, in diffusers' format, under the part's own names; and what the file tells of
    peft's settings, which may be nothing."""
    folder = lora_folder(root, parts, name)
    named = os.path.isfile(os.path.join(folder, LORA_FILE))  # diffusers looks for no name when it is offline
    state, *_, told = lora_files(model_config.architecture).lora_state_dict(
        folder, use_safetensors=True, return_lora_metadata=True, **({"weight_name": LORA_FILE} if named else {})
    )
    return _of_transformer(state), _of_transformer(told or {})


def _of_transformer(named: Mapping[str, Any]) -> dict[str, Any]:
    return {k.removeprefix("transformer."): v for k, v in named.items() if k.startswith("transformer.")}


def load_lora(model_config: DiffusionModelConfig, parts: dict[str, torch.nn.Module]) -> None:
    """Start from LoRA weights in diffusers' format; every tensor must find its place."""
    from peft import set_peft_model_state_dict

    root = os.path.expanduser(model_config.lora_path)
    for name, part in parts.items():
        mine, _ = read_lora(model_config, root, parts, name)
        result = set_peft_model_state_dict(part, mine)
        if not mine or result.unexpected_keys:
            raise ValueError(
                f'lora_path="{model_config.lora_path}" does not fit: unexpected {result.unexpected_keys[:3]}; '
                f"expected LoRA tensors of rank {model_config.lora_rank} for {name}"
            )
