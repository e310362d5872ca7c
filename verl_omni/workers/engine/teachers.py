"""Teachers: frozen policies of the student's family, one for all rows or one for each data_source."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import torch
from verl.protocol import DataProto

from verl_omni.algorithms.forward_process import TEACHER
from verl_omni.utils.suggest import unknown
from verl_omni.workers.engine import frozen
from verl_omni.workers.engine.protocol import TrainingEngine

SETTING = "actor_rollout_ref.actor.teacher.path"


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
            raise ValueError(unknown(f"data_source in {SETTING}", source, teachers))
    batch.batch[TEACHER] = torch.tensor([teachers.index(source) for source in sources])
    return batch


def keep_teachers(engine: TrainingEngine, path: str | Mapping[str, str]) -> None:
    """Under `teacher_name`, from now on."""
    for number, folder in enumerate(teacher_folders(path).values()):
        frozen.keep(engine, teacher_name(number), folder, SETTING)


def only_teachers(student: TrainingEngine, path: str | Mapping[str, str]) -> TrainingEngine:
    """An engine that knows them and has no student: this one says how they compute, and is never built."""
    folders = [Path(folder).expanduser() for folder in teacher_folders(path).values()]
    built = [frozen.built(student, frozen.whole_config(one, student.model_config), one) for one in folders]
    built[0].models = {teacher_name(number): engine for number, engine in enumerate(built)}
    return built[0]


def kept_teachers(engine: TrainingEngine) -> list[str]:
    """Their names, in the order of `teacher_folders`."""
    return list(itertools.takewhile(engine.knows, map(teacher_name, itertools.count())))
