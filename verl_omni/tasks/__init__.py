"""Tasks between the quickstart and a 20B model: data that is drawn here, a generator trained on it, an exact reward."""

import importlib
from types import ModuleType


def find_task(name: str) -> ModuleType:
    """The module of a task: NAME, HEIGHT, WIDTH, `rows`, `training_pictures`, `score` and what else makes one.

    GENERATOR, where it has one, is what its generator has unlike `generator.Size`.
    """
    return importlib.import_module(f"verl_omni.tasks.{name}")
