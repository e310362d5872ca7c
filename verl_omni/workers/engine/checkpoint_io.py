"""Training state on disk, for any number of ranks to read.

Tensors are safetensors files and all else is JSON: reading a checkpoint never runs code that came with it.
"""

import json
import os
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from verl_omni.utils.json_files import read_object
from verl_omni.workers.engine.export import HasWeights, export
from verl_omni.workers.engine.optimizer import set_schedule
from verl_omni.workers.engine.patience import writers
from verl_omni.workers.engine.policies import Policies
from verl_omni.workers.engine.step_in_pieces import make_state_in_pieces
from verl_omni.workers.host_memory import HostMemory, local

STATE = "state"
ENGINE = "engine.json"  # what of the state is no tensor


class HasState(HasWeights, Protocol):
    """What a checkpoint asks of an engine."""

    checkpoint_config: Any
    module: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter]  # those that are trained
    policies: Policies
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    is_optimizer_offload_enabled: bool
    host: HostMemory
    device: torch.device
    micro_batch_size: int
    finds_micro_batch: bool


class Writing:
    """What is being written while training goes on."""

    def __init__(self, parts: list[Future]):
        self.parts = parts

    def done(self, wait: bool) -> bool:
        """Whether all of it has been written; an error of one of them is raised."""
        if wait:
            self.end()
        elif not all(part.done() for part in self.parts):
            return False
        with _plain_errors():
            for part in self.parts:
                part.result()
        return True

    def end(self) -> None:
        """Wait for all of them, whether they fail or not."""
        futures.wait(self.parts)


def save(engine: HasState, path: str) -> Writing | None:
    """With `async_save` it goes on when this returns: what is written is a copy."""
    contents, behind = engine.checkpoint_config.save_contents, engine.checkpoint_config.async_save
    parts: list[Future] = []
    if set(contents) - {"export"}:
        parts += _save_state(engine, contents, os.path.join(path, STATE), behind)
    if "export" in contents and not behind:
        export(engine, os.path.join(path, "export"))
    elif "export" in contents:
        writer = ThreadPoolExecutor(1, thread_name_prefix="export")
        parts += export(engine, os.path.join(path, "export"), writer.submit)
        writer.shutdown(wait=False)
    if set(contents) - {"export"}:  # after all that ranks do together: an error of one would leave the others waiting
        _write_notes(engine, os.path.join(path, STATE))
    return Writing(parts) if behind else None


def load(engine: HasState, path: str) -> None:
    """Fill the engine in place with what `load_contents` names; all of it is there and fits, or nothing is touched."""
    contents = engine.checkpoint_config.load_contents
    folder = os.path.join(path, STATE)
    reader = dcp.HuggingFaceStorageReader(folder)
    notes, held = _read_notes(folder), reader.read_metadata().state_dict_metadata
    tensors = _weights(engine) if "model" in contents else {}
    if "model" in contents:
        _check_fit(tensors, held, "model.", folder)
    if "optimizer" in contents:
        with _kept_unless_it_fits(engine.optimizer):
            tensors |= _empty_moments(engine, notes, folder)
            _check_fit(tensors, held, "optimizer.", folder)
    with _plain_errors():
        dcp.load(tensors, storage_reader=reader)
    if "model" in contents:
        engine.policies.load_state_dict(
            {name: {k: local(tensors[f"policies.{name}.{k}"]) for k in copy}
             for name, copy in engine.policies.state_dict().items()}
        )  # fmt: skip
    if "extra" in contents:
        set_schedule(engine.lr_scheduler, notes["optimizer_steps"])
        if engine.finds_micro_batch:  # another one would round differently
            engine.micro_batch_size = notes.get("micro_batch_size", 0)


def needed_bytes(engine: HasState) -> int:
    """What `save` would write now, of all ranks together."""
    contents = engine.checkpoint_config.save_contents
    tensors = list(_tensors(engine, contents).values())
    if "export" in contents:
        tensors += engine.parameters.values()
    return sum(t.numel() * t.element_size() for t in tensors)


def _save_state(engine: HasState, contents: list[str], folder: str, behind: bool) -> list[Future]:
    """What of it is left to be written: with `behind`, all."""
    tensors = {name: tensor.contiguous() for name, tensor in _tensors(engine, contents).items()}
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
    with _plain_errors():
        if behind:
            return [dcp.async_save(tensors, storage_writer=writer, process_group=writers())]
        dcp.save(tensors, storage_writer=writer, process_group=writers())
        return []


def _write_notes(engine: HasState, folder: str) -> None:
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        notes = {
            "optimizer": type(engine.optimizer).__name__,
            "optimizer_steps": engine.lr_scheduler.last_epoch,
            # Those that never got a gradient (a last block's text output) have no state, and are not named.
            "moments": {name: sorted(engine.optimizer.state[p]) for name, p in _updated(engine).items()},
        }
        if engine.finds_micro_batch:
            notes["micro_batch_size"] = engine.micro_batch_size
        Path(folder, ENGINE).write_text(json.dumps(notes))


def _tensors(engine: HasState, contents: list[str]) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds. Frozen weights are those of the base model: they are not written again."""
    tensors = _weights(engine) if "model" in contents else {}
    return tensors | (_moments(engine) if "optimizer" in contents else {})


def _weights(engine: HasState) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": parameter.detach() for name, parameter in engine.parameters.items()}
    for policy, copy in engine.policies.state_dict().items():
        found |= {f"policies.{policy}.{name}": _like(v, engine.parameters[name]) for name, v in copy.items()}
    return found


def _moments(engine: HasState) -> dict[str, torch.Tensor]:
    found = {
        f"optimizer.{name}.{key}": value
        for name, parameter in _updated(engine).items()
        for key, value in engine.optimizer.state[parameter].items()
    }
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            kind = type(engine.optimizer).__name__
            raise ValueError(
                f"{kind} keeps a {type(value).__name__} as {name}, which checkpoints do not hold: choose another "
                "actor_rollout_ref.actor.optim.optimizer, such as AdamW"
            )
    return found


def _updated(engine: HasState) -> dict[str, torch.nn.Parameter]:
    """The parameters that the optimizer has a state for."""
    return {name: p for name, p in engine.parameters.items() if engine.optimizer.state.get(p)}


def _empty_moments(engine: HasState, notes: dict, folder: str) -> dict[str, torch.Tensor]:
    """Optimizer state to be filled, for exactly those parameters that have one in the checkpoint."""
    kind = type(engine.optimizer).__name__
    if notes["optimizer"] != kind:
        raise ValueError(
            f"{folder} holds the state of {notes['optimizer']}, and this run's optimizer is {kind}: to start that one "
            "fresh, set actor_rollout_ref.actor.checkpoint.load_contents=[model,extra]"
        )
    engine.optimizer.zero_grad()
    engine.optimizer.state.clear()
    if notes["moments"] and engine.is_optimizer_offload_enabled:
        held = [p for name, p in engine.parameters.items() if name in notes["moments"]]
        make_state_in_pieces(engine.optimizer, held, engine.host, engine.device)
    elif notes["moments"]:  # torch makes an empty state for every parameter
        get_optimizer_state_dict(engine.module, engine.optimizer, options=StateDictOptions(ignore_frozen_params=True))
    for name, parameter in engine.parameters.items():
        if name not in notes["moments"]:
            engine.optimizer.state.pop(parameter, None)
    made = {name: sorted(engine.optimizer.state[p]) for name, p in _updated(engine).items()}
    for name in made.keys() | notes["moments"].keys():
        if made.get(name) != notes["moments"].get(name):
            raise ValueError(
                f"{folder} does not fit this run: for {name} it holds the optimizer's {notes['moments'].get(name)}, "
                f"and {kind} needs {made.get(name)}. To start the optimizer fresh, set "
                "actor_rollout_ref.actor.checkpoint.load_contents=[model,extra]"
            )
    return _moments(engine)


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


def _read_notes(folder: str) -> dict:
    try:
        return read_object(Path(folder, ENGINE))
    except FileNotFoundError:
        raise ValueError(
            f"{folder} holds no training state to resume from: was it saved with "
            "actor_rollout_ref.actor.checkpoint.save_contents without model?"
        ) from None


def _check_fit(tensors: dict[str, torch.Tensor], held: dict, kind: str, folder: str) -> None:
    """Refuse a checkpoint that lacks tensors of this run or has them in another shape, before anything is loaded.

    Of what is called `kind` it has no others either: they would be lost without a word.
    """
    same = (
        "Resume with the settings of the run that wrote it (model, lora_rank, target_modules, ema_decay, use_kl_loss), "
        "or start anew with trainer.resume_mode=disable"
    )
    for name, tensor in tensors.items():
        found = tuple(held[name].size) if name in held else "nothing"
        if found != tuple(tensor.shape):
            raise ValueError(
                f"{folder} does not fit this run: for {name} of shape {tuple(tensor.shape)} it holds {found}. {same}"
            )
    for name in held:
        if name.startswith(kind) and name not in tensors:
            raise ValueError(f"{folder} does not fit this run, which has no place for its {name}. {same}")


@contextmanager
def _kept_unless_it_fits(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Where an error ends the block, the optimizer has the state that it had."""
    before = dict(optimizer.state)
    try:
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise


@contextmanager
def _plain_errors() -> Iterator[None]:
    """torch gathers the errors of all ranks in a BaseException; the first of them says what happened."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
