"""One place for a config knob: name, type, default and help text are a single dataclass field."""

import dataclasses
from collections.abc import Iterator
from typing import Any


def knob(default: Any, help: str) -> Any:
    """A dataclass field with a default and the sentence that `--help` prints for it."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata={"help": help})
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def walk(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted name, default, help) of every knob below a config dataclass."""
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(default):
            yield from walk(type(default), f"{name}.")
        else:
            yield name, default, field.metadata.get("help", "")
