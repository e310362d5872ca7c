"""Training state on disk (torch.distributed.checkpoint, any world size), and weights in diffusers' format."""

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from verl_omni.pipelines.utils import pipeline_class
from verl_omni.workers.config import DiffusionModelConfig

if TYPE_CHECKING:
    from verl_omni.workers.engine.fsdp.diffusers_impl import DiffusersFSDPEngine

# Frozen weights are those of the base model: they are not written again.
OPTIONS = StateDictOptions(ignore_frozen_params=True)
LORA_FILE = "pytorch_lora_weights.safetensors"  # what diffusers calls it


def _state(engine: "DiffusersFSDPEngine", contents: list[str]) -> dict:
    state = {}
    if "model" in contents:
        state["model"] = get_model_state_dict(engine.module, options=OPTIONS)
        state["policies"] = {
            name: {k: _like(v, engine.parameters[k]) for k, v in copy.items()}
            for name, copy in engine.policies.state_dict().items()
        }
    if "optimizer" in contents:
        state["optimizer"] = get_optimizer_state_dict(engine.module, engine.optimizer, options=OPTIONS)
    if "extra" in contents:
        state["lr_scheduler"] = engine.lr_scheduler.state_dict()
    return state


def _like(shard: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A copy of a shard as the distributed tensor that its parameter is."""
    if not hasattr(parameter, "device_mesh"):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def save(engine: "DiffusersFSDPEngine", path: str) -> None:
    contents = engine.checkpoint_config.save_contents
    if set(contents) - {"export"}:
        dcp.save(_state(engine, contents), checkpoint_id=os.path.join(path, "state"))
    if "export" in contents:
        export(engine, os.path.join(path, "export"))


def load(engine: "DiffusersFSDPEngine", path: str) -> None:
    contents = engine.checkpoint_config.load_contents
    folder = os.path.join(path, "state")
    if "optimizer" in contents:  # torch then makes an empty state for every parameter, to be filled from the file
        engine.optimizer.zero_grad()
        engine.optimizer.state.clear()
    state = _state(engine, contents)
    _check_fit(state, folder)
    # A parameter that never got a gradient (a last block's text output) has no optimizer state to load.
    dcp.load(state, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    if "model" in contents:
        set_model_state_dict(
            engine.module, state["model"], options=StateDictOptions(ignore_frozen_params=True, strict=False)
        )
        engine.policies.load_state_dict(
            {n: {k: v.to_local() if hasattr(v, "to_local") else v for k, v in c.items()}
             for n, c in state["policies"].items()}
        )  # fmt: skip
    if "optimizer" in contents:
        set_optimizer_state_dict(engine.module, engine.optimizer, state["optimizer"], options=OPTIONS)
    if "extra" in contents:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])


def _check_fit(state: dict, folder: str) -> None:
    """Refuse a checkpoint that lacks weights of this run or has them in another shape, before anything is loaded."""
    if not os.path.isfile(os.path.join(folder, ".metadata")):
        raise ValueError(
            f"{folder} holds no training state to resume from: was it saved with "
            "actor_rollout_ref.actor.checkpoint.save_contents without model?"
        )
    held = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    needed = {f"model.{name}": tensor for name, tensor in state.get("model", {}).items()}
    for policy, copy in state.get("policies", {}).items():
        needed |= {f"policies.{policy}.{name}": tensor for name, tensor in copy.items()}
    for name, tensor in needed.items():
        found = tuple(held[name].size) if name in held else "nothing"
        if found != tuple(tensor.shape):
            raise ValueError(
                f"{folder} does not fit this run: for {name} of shape {tuple(tensor.shape)} it holds {found}. Resume "
                "with the settings of the run that wrote it (model, lora_rank, ema_decay, use_kl_loss), or start anew "
                "with trainer.resume_mode=disable"
            )


def export(engine: "DiffusersFSDPEngine", folder: str) -> None:
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
    dist.barrier()


def _lora_folder(folder: str, parts: dict[str, torch.nn.Module], name: str) -> str:
    """diffusers reads one LoRA file for one transformer: the first part's lies in `folder`, another's below it.

    `pipe.load_lora_weights(f"{folder}/transformer_2", load_into_transformer_2=True)` loads Wan2.2's second.
    """
    return folder if name == next(iter(parts)) else os.path.join(folder, name)


def _write_lora(engine: "DiffusersFSDPEngine", states: dict[str, dict[str, torch.Tensor]], folder: str) -> None:
    for name, state in states.items():
        # peft puts the adapter's name into the key; diffusers' files do not have it. Buffers are the base model's.
        lora = {k.replace(".default.", "."): v.contiguous() for k, v in state.items() if ".lora_" in k}
        pipeline_class(engine.model_config.architecture).save_lora_weights(
            _lora_folder(folder, engine.parts, name),
            transformer_lora_layers=lora,
            transformer_lora_adapter_metadata=engine.parts[name].peft_config["default"].to_dict(),
        )


def _write_full(engine: "DiffusersFSDPEngine", states: dict[str, dict[str, torch.Tensor]], folder: str) -> None:
    from safetensors.torch import save_file

    for name, state in states.items():
        target = os.path.join(folder, name)
        os.makedirs(target, exist_ok=True)
        engine.parts[name].save_config(target)
        tensors = {k: v.contiguous() for k, v in state.items()}
        save_file(tensors, os.path.join(target, "diffusion_pytorch_model.safetensors"), metadata={"format": "pt"})


def load_lora(model_config: DiffusionModelConfig, parts: dict[str, torch.nn.Module]) -> None:
    """Start from LoRA weights in diffusers' format; every tensor must find its place."""
    from peft import set_peft_model_state_dict

    root = os.path.expanduser(model_config.lora_path)
    for name, part in parts.items():
        folder = _lora_folder(root, parts, name)
        named = os.path.isfile(os.path.join(folder, LORA_FILE))  # diffusers looks for no name when it is offline
        state = pipeline_class(model_config.architecture).lora_state_dict(
            folder, **({"weight_name": LORA_FILE} if named else {})
        )
        state = state[0] if isinstance(state, tuple) else state
        mine = {k.removeprefix("transformer."): v for k, v in state.items() if k.startswith("transformer.")}
        result = set_peft_model_state_dict(part, mine)
        if not mine or result.unexpected_keys:
            raise ValueError(
                f'lora_path="{model_config.lora_path}" does not fit: unexpected {result.unexpected_keys[:3]}; '
                f"expected LoRA tensors of rank {model_config.lora_rank} for {name}"
            )
