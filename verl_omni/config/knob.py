"""One place for a config knob: name, type, default, help text and range are a single dataclass field."""

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from verl_omni.utils.suggest import unknown

# What every generator of random numbers takes.
MOST_SEED = 2**32 - 1
# Beyond these a number is a slip of the keyboard, not a setting.
MOST_STEPS = 10**9  # of training, and whatever is counted in them
MOST_PROMPTS = 10**6  # of a step, of a validation, in one pass
MOST_IMAGES = 10**4  # of a prompt, in one forward, of a video
MOST_DENOISING = 10**4
MOST_SIDE = 2**14  # of an image in pixels, of a weight in columns
MOST_TOKENS = 10**5
MOST_PROCESSES = 1024  # on a node
MOST_NODES = 10**4
MOST_TRIES = 10**4
MOST_SECONDS = 10**7  # four months


@dataclass(frozen=True)
class Range:
    """What a knob may be. Numbers are always finite; for a list this holds for each of its elements."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: Iterable[str] | Callable[[], Iterable[str]] | None = None
    also: tuple[Any, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def names(self) -> list[str]:
        return list(self.choices() if callable(self.choices) else self.choices or ())

    def bounds(self) -> str:
        """`1 or more`, `above 0, at most 1`, ...; empty where there are none."""
        low = [f"{_plain(self.least)} or more"] if self.least is not None else []
        low += [f"above {_plain(self.above)}"] if self.above is not None else []
        high = [f"at most {_plain(self.most)}"] if self.most is not None else []
        high += [f"below {_plain(self.below)}"] if self.below is not None else []
        special = [str(value) for value in self.also]
        return " or ".join([*special, ", ".join(low + high)]) if low or high else ""

    def shown(self) -> str:
        """What `--help` prints of it. Names that can be registered are not looked up for that."""
        fixed = "" if self.choices is None or callable(self.choices) else f"one of {', '.join(self.choices)}"
        return self.bounds() or fixed

    def check(self, name: str, value: Any) -> None:
        """Raise one line that says what was expected of the knob `name`."""
        if isinstance(value, list | tuple):
            for element in value:
                self.check(name, element)
        elif isinstance(value, bool) or value is None or value in self.also:
            return
        elif isinstance(value, int | float):
            outside = (
                not is_finite(value)
                or (self.least is not None and value < self.least)
                or (self.above is not None and value <= self.above)
                or (self.most is not None and value > self.most)
                or (self.below is not None and value >= self.below)
            )
            if outside:
                raise ValueError(f"{name}={value!s:.40}: expected {self.bounds() or 'a finite number'}")
        elif isinstance(value, str) and value in self.refused:
            raise ValueError(f"{name}={value}: {self.refused[value]}; known: {', '.join(self.names())}")
        elif isinstance(value, str) and self.choices is None and any(isinstance(word, str) for word in self.also):
            raise ValueError(f"{name}={value:.40}: expected {self.bounds()}")
        elif self.choices is not None and value not in self.names():
            raise ValueError(unknown(name, value, self.names()))


def is_finite(number: float) -> bool:
    """As a float: a whole number can be too large for one."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


class Knob(NamedTuple):
    """A knob as it was declared, under its dotted name."""

    name: str
    default: Any
    help: str
    range: Range
    #: another knob, as `name=value`, `name=value or value`, or (where any value but null, false and 0 will do; 0 will
    #: too, if null is the default) `name`, without which this one has no effect
    needs: str | None
    #: why only the default is accepted today
    waits: str | None
    #: whether a run may go on from its checkpoint with another value: it does not change what is learned, or people
    #: change it on purpose in the middle of a run
    may_change: bool

    def text(self) -> str:
        """What `--help` prints below the name: the sentence, the range, and what it takes to have an effect."""
        if self.waits:
            return f"{self.help} [only {typed(self.default)} so far]"
        notes = [note for note in (self.range.shown(), f"only with {self.needs}" if self.needs else "") if note]
        return self.help + (f" [{'; '.join(notes)}]" if notes else "")


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
    refused: Mapping[str, str] | None = None,
    needs: str | None = None,
    waits: str | None = None,
    may_change: bool = False,
    of_some_models: bool = False,
) -> Any:
    """A dataclass field with a default, the sentence that `--help` prints for it, and what it may be.

    `also` are values outside of the bounds that mean something, such as -1. `choices` may be a function, where names
    can be registered, and `refused` says of names that others take why they are none here. `needs`, `waits`
    and `may_change` are as in `Knob`: what would change nothing is refused. Of a group, the last holds for all in it.
    `of_some_models`: a model's adapter says whether it reads it.
    """
    metadata = {
        "help": help,
        "range": Range(least, above, most, below, choices, also, refused or {}),
        "needs": needs,
        "waits": waits,
        "may_change": may_change,
        "of_some_models": of_some_models,
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# The value of a setting at its earlier place, where nobody gave it one.
UNSAID = "(moved)"


def moved(to: str) -> Any:
    """A field for the earlier place of a setting that is declared under the dotted name `to` now.

    It is no knob of its own: `keys.take_moved` gives what a user wrote there to the knob, and says so.
    """
    return dataclasses.field(default=UNSAID, metadata={"moved": to})


def moved_names(cls: type, prefix: str = "") -> dict[str, str]:
    """Earlier name -> name, of all settings below a config dataclass that have moved."""
    found = {}
    for field in dataclasses.fields(cls):
        if "moved" in field.metadata:
            found[f"{prefix}{field.name}"] = field.metadata["moved"]
        elif isinstance(field.default_factory, type) and dataclasses.is_dataclass(field.default_factory):
            found |= moved_names(field.default_factory, f"{prefix}{field.name}.")
    return found


def names_in(module: str, table: str) -> Callable[[], Iterable[str]]:
    """Choices that are the names in a module's table (or what a function there gives), imported when asked for."""

    def names() -> Iterable[str]:
        found = getattr(importlib.import_module(module), table)
        return found() if callable(found) else found

    return names


def walk(cls: type, prefix: str = "", may_change: bool = False) -> Iterator[Knob]:
    """Every knob below a config dataclass; `may_change` is said of all of them by what is above."""
    for field in dataclasses.fields(cls):
        if field.name.startswith("_") or "moved" in field.metadata:
            continue
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default
        name, known = f"{prefix}{field.name}", field.metadata
        free = may_change or known.get("may_change", False)
        if dataclasses.is_dataclass(default):
            yield from walk(type(default), f"{name}.", free)
        else:
            help, range_ = known.get("help", ""), known.get("range", Range())
            yield Knob(name, default, help, range_, known.get("needs"), known.get("waits"), free)


def check_ranges(settings: Any) -> None:
    """Every knob below a config object is within its range, or one line says which is not."""
    for knob in walk(type(settings)):
        knob.range.check(knob.name, value_of(settings, knob.name))


def check_effect(given: Any, settings: Any) -> None:
    """What was `given`, and differs from its default, has an effect under `settings`, or one line says what does not.

    The two are the configuration as the user left it and as it runs.
    """
    knobs = {knob.name: knob for knob in walk(type(given))}
    for knob in knobs.values():
        value = value_of(given, knob.name)
        if value is None or value == knob.default:
            continue
        shown = f"{knob.name}={typed(value)}"
        if knob.waits:
            raise ValueError(f"{shown}: {knob.waits}; leave it {typed(knob.default)}")
        if knob.needs:
            other, _, wanted = knob.needs.partition("=")
            now = typed(value_of(settings, other))
            off = ("null", "false") if knobs[other].default is None else ("null", "false", "0", "0.0")
            if now not in wanted.split(" or ") if wanted else now in off:
                raise ValueError(f"{shown} has no effect with {other}={now}: leave it out, or set {_remedy(knob)}")


def value_of(settings: Any, name: str) -> Any:
    """The value under a dotted name."""
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def _remedy(knob: Knob) -> str:
    return knob.needs if "=" in knob.needs else f"{knob.needs} too"


def typed(value: Any) -> str:
    """As one types it on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plain(number: float) -> str:
    """Without rounding: a bound is to be typed as it is read."""
    return str(int(number)) if float(number).is_integer() else f"{number:g}"
