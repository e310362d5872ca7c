"""One place for a config knob: name, type, default, help text and range are a single dataclass field."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from verl_omni.utils.suggest import unknown


@dataclass(frozen=True)
class Range:
    """What a knob may be. Numbers are always finite; for a list this holds for each of its elements."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: Iterable[str] | Callable[[], Iterable[str]] | None = None
    also: tuple[Any, ...] = ()

    def names(self) -> list[str]:
        return list(self.choices() if callable(self.choices) else self.choices or ())

    def bounds(self) -> str:
        """`1 or more`, `above 0, at most 1`, ...; empty where there are none."""
        low = [f"{self.least:g} or more"] if self.least is not None else []
        low += [f"above {self.above:g}"] if self.above is not None else []
        high = [f"at most {self.most:g}"] if self.most is not None else []
        high += [f"below {self.below:g}"] if self.below is not None else []
        special = [str(value) for value in self.also]
        return " or ".join([*special, ", ".join(low + high)]) if low or high else ""

    def check(self, name: str, value: Any) -> None:
        """Raise one line that says what was expected of the knob `name`."""
        if isinstance(value, list | tuple):
            for element in value:
                self.check(name, element)
        elif isinstance(value, bool) or value is None or value in self.also:
            return
        elif isinstance(value, int | float):
            outside = (
                not math.isfinite(value)
                or (self.least is not None and value < self.least)
                or (self.above is not None and value <= self.above)
                or (self.most is not None and value > self.most)
                or (self.below is not None and value >= self.below)
            )
            if outside:
                raise ValueError(f"{name}={value}: expected {self.bounds() or 'a finite number'}")
        elif self.choices is not None and value not in self.names():
            raise ValueError(unknown(name, value, self.names()))


def knob(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: Iterable[str] | Callable[[], Iterable[str]] | None = None,
    also: tuple[Any, ...] = (),
) -> Any:
    """A dataclass field with a default, the sentence that `--help` prints for it, and what it may be.

    `also` are values outside of the bounds that mean something, such as -1. `choices` may be a function, where names
    can be registered.
    """
    metadata = {"help": help, "range": Range(least, above, most, below, choices, also)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


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


def check_ranges(settings: Any, prefix: str = "") -> None:
    """Every knob below a config object is within its range, or one line says which is not."""
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            check_ranges(value, f"{name}.")
        elif "range" in field.metadata:
            field.metadata["range"].check(name, value)
