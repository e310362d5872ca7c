"""What was measured of a model, kept for the next plan: of one that it knows, it need not run anything."""

import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_omni import pipelines
from verl_omni.perf import live_bytes
from verl_omni.utils.json_files import read_object
from verl_omni.utils.user_cache import user_cache
from verl_omni.workers import engine

PACKAGES = ("torch", "diffusers", "peft")


class Remembered:
    """Lists of numbers by name, in a file of what they are `about`: all that they depend on, and the code of `by`."""

    def __init__(self, about: Any, by: tuple[type, ...]):
        versions = [importlib.metadata.version(name) for name in PACKAGES]
        said = json.dumps([about, [_code(cls) for cls in by], _own_code(), versions])
        self.file = user_cache("plan") / f"{hashlib.sha256(said.encode()).hexdigest()}.json"

    def read(self) -> dict[str, list[float]]:
        try:
            found = read_object(self.file)
        except (OSError, ValueError):  # none, or half of one: it is measured, and written anew
            return {}
        return {name: [float(number) for number in numbers] for name, numbers in found.items()}

    def write(self, numbers: Mapping[str, list[float]]) -> None:
        unfinished = self.file.with_suffix(f".{os.getpid()}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(dict(numbers)))
            unfinished.replace(self.file)
        except OSError:  # a home that cannot be written to: the next plan measures again
            return


def _code(cls: type) -> list[str]:
    """Of a class and those that it stands on, but for what has a version."""
    theirs = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in (*PACKAGES, "builtins", "abc")]
    return [Path(inspect.getfile(base)).read_text() for base in theirs]


@functools.cache
def _own_code() -> list[str]:
    """Of all that a measured pass may go through."""
    measured = [Path(__file__).parent, Path(live_bytes.__file__).parent, *pipelines.__path__, *engine.__path__]
    return [file.read_text() for folder in measured for file in sorted(Path(folder).rglob("*.py"))]
