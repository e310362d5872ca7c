"""Trained weights as files that diffusers loads, and LoRA files to start from."""

import json
import os
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.utils import pipeline_class
from verl_omni.utils.file_mode import share

LORA_FILE = "pytorch_lora_weights.safetensors"  # what diffusers calls it


class HasWeights(Protocol):
    """What an export asks of an engine."""

    model_config: DiffusionModelConfig
    parts: dict[str, torch.nn.Module]
    ema_decay: float | None

    def policy(self, name: str) -> AbstractContextManager[None]:
        """In here the weights are those of that policy."""


def export(engine: HasWeights, folder: str) -> None:
    """LoRA: a folder for `pipe.load_lora_weights(folder)`. Full: one diffusers model folder for each trained part.

    With a moving average, that is what is exported: it is what validation has seen.
    """
    with engine.policy("ema" if engine.ema_decay else "current"):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        states = {name: get_model_state_dict(part, options=options) for name, part in engine.parts.items()}
        if dist.get_rank() == 0:  # still inside: on one rank the states are the weights themselves, not copies
            os.makedirs(folder, exist_ok=True)
            write = _write_lora if engine.model_config.lora_rank > 0 else _write_full
            write(engine, states, folder)
            share(folder)
    dist.barrier()


def lora_folder(folder: str, parts: dict[str, torch.nn.Module], name: str) -> str:
    """diffusers reads one LoRA file for one transformer: the first part's lies in `folder`, another's below it.

    `pipe.load_lora_weights(f"{folder}/transformer_2", load_into_transformer_2=True)` loads Wan2.2's second.
    """
    return folder if name == next(iter(parts)) else os.path.join(folder, name)


def _write_lora(engine: HasWeights, states: dict[str, dict[str, torch.Tensor]], folder: str) -> None:
    for name, state in states.items():
        # peft puts the adapter's name into the key; diffusers' files do not have it. Buffers are the base model's.
        lora = {k.replace(".default.", "."): v.contiguous() for k, v in state.items() if ".lora_" in k}
        told = engine.parts[name].peft_config["default"].to_dict()
        target = lora_folder(folder, engine.parts, name)
        pipeline_class(engine.model_config.architecture).save_lora_weights(
            target,
            transformer_lora_layers=lora,
            # A set has another order in every process.
            transformer_lora_adapter_metadata={k: sorted(v) if isinstance(v, set) else v for k, v in told.items()},
        )
        order_metadata(os.path.join(target, LORA_FILE))


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


def _write_full(engine: HasWeights, states: dict[str, dict[str, torch.Tensor]], folder: str) -> None:
    from safetensors.torch import save_file

    for name, state in states.items():
        target = os.path.join(folder, name)
        os.makedirs(target, exist_ok=True)
        engine.parts[name].save_config(target)
        tensors = {k: v.contiguous() for k, v in state.items()}
        save_file(tensors, os.path.join(target, "diffusion_pytorch_model.safetensors"), metadata={"format": "pt"})


def read_lora(
    model_config: DiffusionModelConfig, root: str, parts: dict[str, torch.nn.Module], name: str
) -> dict[str, torch.Tensor]:
    """The LoRA weights of one part, in diffusers' format, under the part's own names."""
    folder = lora_folder(root, parts, name)
    named = os.path.isfile(os.path.join(folder, LORA_FILE))  # diffusers looks for no name when it is offline
    state = pipeline_class(model_config.architecture).lora_state_dict(
        folder, use_safetensors=True, **({"weight_name": LORA_FILE} if named else {})
    )
    state = state[0] if isinstance(state, tuple) else state
    return {k.removeprefix("transformer."): v for k, v in state.items() if k.startswith("transformer.")}


def load_lora(model_config: DiffusionModelConfig, parts: dict[str, torch.nn.Module]) -> None:
    """Start from LoRA weights in diffusers' format; every tensor must find its place."""
    from peft import set_peft_model_state_dict

    root = os.path.expanduser(model_config.lora_path)
    for name, part in parts.items():
        mine = read_lora(model_config, root, parts, name)
        result = set_peft_model_state_dict(part, mine)
        if not mine or result.unexpected_keys:
            raise ValueError(
                f'lora_path="{model_config.lora_path}" does not fit: unexpected {result.unexpected_keys[:3]}; '
                f"expected LoRA tensors of rank {model_config.lora_rank} for {name}"
            )
