"""The folder of a model that is trained here: whole or not there, with what made it beside the weights."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RECIPE = "recipe.json"


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """The folder to write to, which becomes `out` at the end. One that is there already is refused before the work.

    Nothing is left of one that fails.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists: choose another folder or remove it")
    unfinished = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
    try:
        yield unfinished
    except BaseException:
        if unfinished.exists():
            shutil.rmtree(unfinished)
        raise
    if out.exists():  # what was made may have taken hours
        raise FileExistsError(f"{out} has appeared meanwhile: what was made is in {unfinished}, rename it")
    unfinished.rename(out)


def write_recipe(folder: Path, recipe: Mapping[str, Any]) -> None:
    (folder / RECIPE).write_text(json.dumps(recipe, indent=2) + "\n")
