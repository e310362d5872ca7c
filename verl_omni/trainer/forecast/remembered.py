"""What was measured of a model, kept for the next plan: of one that it knows, it need not run anything."""

import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import verl_omni
from verl_omni.utils.json_files import read_object
from verl_omni.utils.user_cache import user_cache

PACKAGES = ("torch", "diffusers", "transformers", "peft")
KEPT = 20  # files: of an older version of anything nobody will ask again


class Remembered:
    """What was found, by name: numbers, and lists of them. For as long as this process lives, and where `key` says what
    they are about, in a file for the next one."""

    def __init__(self, key: str | None = None):
        self.file = user_cache("plan") / f"{key}.json" if key else None
        self._known = self._read()

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def __getitem__(self, name: str) -> Any:
        return self._known[name]

    def get(self, name: str, find: Callable[[], Any]) -> Any:
        if name not in self._known:
            self.add({name: find()})
        return self._known[name]

    def add(self, found: Mapping[str, Any]) -> None:
        self._known |= found
        if self.file is None:
            return
        unfinished = self.file.with_suffix(f".{os.getpid()}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(self._known))
            unfinished.replace(self.file)
            self._forget()
        except OSError:  # a home that cannot be written to: the next plan measures again
            return

    def _forget(self) -> None:
        """All but the newest files, whatever was left there."""
        files = {file: file.stat().st_mtime_ns for file in self.file.parent.iterdir()}
        for file in sorted(files, key=files.get)[:-KEPT]:
            file.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            return read_object(self.file) if self.file else {}
        except (OSError, ValueError):  # none, or half of one: it is measured, and written anew
            return {}


def key_of(about: Any, by: tuple[type, ...]) -> str:
    """Of figures that depend on `about` and on the code of `by`, beside ours and that of the packages."""
    versions = [importlib.metadata.version(name) for name in PACKAGES]
    said = json.dumps([about, [_code(cls) for cls in by], own_code(), versions])
    return hashlib.sha256(said.encode()).hexdigest()


def _code(cls: type) -> list[str]:
    """Which class it is, and the files of it and of those that it stands on, but for ours and what has a version."""
    known = (*PACKAGES, "verl_omni", "builtins", "abc")
    theirs = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in known]
    return [cls.__module__, cls.__qualname__, *(Path(inspect.getfile(base)).read_text() for base in theirs)]


@functools.cache
def own_code() -> list[str]:
    """All of it: a measured pass may go anywhere."""
    return [file.read_text() for file in sorted(Path(verl_omni.__file__).parent.rglob("*.py"))]
