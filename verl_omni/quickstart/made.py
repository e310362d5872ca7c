"""The folder of a model that is trained here: whole or not there, with what made it beside the weights."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RECIPE = "recipe.json"


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """The folder to write to, which becomes `out` at the end. One that is there already is refused before the work."""
    if out.exists():
        raise FileExistsError(f"{out} exists: choose another folder or remove it")
    unfinished = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
    yield unfinished
    unfinished.rename(out)


def write_recipe(folder: Path, recipe: Mapping[str, Any]) -> None:
    (folder / RECIPE).write_text(json.dumps(recipe, indent=2) + "\n")
