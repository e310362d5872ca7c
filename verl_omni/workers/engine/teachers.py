"""Frozen policies of the same family: weights from a folder in the place of those that are trained.

With LoRA a teacher is an adapter of the same base, rank and target modules: a few megabytes. In full training it is a
copy of the transformer's weights, sharded as they are. No second module exists.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from verl.protocol import DataProto

from verl_omni.algorithms.forward_process import TEACHER
from verl_omni.utils.suggest import unknown
from verl_omni.workers.engine.protocol import TrainingEngine


def teacher_folders(path: str | Mapping[str, str] | None) -> dict[str | None, str]:
    """data_source -> folder; under None the one for all."""
    if path is None:
        return {}
    return {None: path} if isinstance(path, str) else dict(path)


def teacher_name(number: int) -> str:
    """Of the policy, by its place in `teacher_folders`."""
    return f"{TEACHER} {number}"


def number_teachers(batch: DataProto, path: str | Mapping[str, str]) -> DataProto:
    """Each row with the number of its teacher, that of its data_source."""
    teachers = list(teacher_folders(path))
    sources = [None if None in teachers else source for source in batch.non_tensor_batch["data_source"]]
    for source in sources:
        if source not in teachers:
            raise ValueError(unknown("data_source in actor_rollout_ref.actor.teacher.path", source, teachers))
    batch.batch[TEACHER] = torch.tensor([teachers.index(source) for source in sources])
    return batch


def keep_teachers(engine: TrainingEngine, path: str | Mapping[str, str]) -> None:
    """Under `teacher_name`, from now on."""
    for number, folder in enumerate(teacher_folders(path).values()):
        engine.policies.keep_frozen(teacher_name(number), _read(engine, Path(folder).expanduser()))


def _read(engine: TrainingEngine, folder: Path) -> dict[str, torch.Tensor]:
    """Each trained parameter's value in that folder, as whole tensors in CPU memory."""
    names = {id(parameter): name for name, parameter in engine.parameters.items()}
    lora, found = engine.model_config.lora_rank > 0, {}
    for part_name, part in engine.parts.items():
        state = _lora(engine, folder, part_name) if lora else _full(folder / part_name)
        for name, parameter in part.named_parameters():
            if id(parameter) not in names:
                continue
            value = state.get(name.replace(".default.", ".") if lora else name)
            if value is None or value.shape != parameter.shape:
                seen = "nothing" if value is None else f"shape {tuple(value.shape)}"
                raise ValueError(
                    f"actor_rollout_ref.actor.teacher.path={folder} has {seen} for {part_name}.{name}, and the student "
                    f"shape {tuple(parameter.shape)}: a teacher has the student's architecture"
                    + (", lora_rank and target_modules" if lora else "")
                )
            found[names[id(parameter)]] = value.to(parameter.dtype)
    return found


def _lora(engine: TrainingEngine, folder: Path, part: str) -> dict[str, torch.Tensor]:
    """B is scaled, where the teacher was trained with another alpha."""
    from safetensors import safe_open

    from verl_omni.workers.engine.export import LORA_FILE, lora_folder, read_lora

    state = read_lora(engine.model_config, str(folder), engine.parts, part)
    file = Path(lora_folder(str(folder), engine.parts, part), LORA_FILE)
    if not file.is_file():
        return state
    with safe_open(file, "pt") as opened:
        told = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
    own, alpha = engine.model_config.lora_alpha, told.get("transformer.lora_alpha")
    scale = 1.0 if alpha is None else alpha / own
    return {name: value * scale if ".lora_B." in name else value for name, value in state.items()}


def _full(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(os.fspath(file)).items()}
