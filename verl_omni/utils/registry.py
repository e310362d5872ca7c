"""Names that users can add to: no enum, no allow-list, and a clear line for a name that is not there."""

import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from verl_omni.utils.suggest import unknown

T = TypeVar("T")

# A user's modules that have registered something in this process, each with the first thing: what workers import too.
registrations: dict[str, str] = {}


class Registry(Generic[T]):
    """Name -> thing. ``load`` brings in the built-in entries and runs at the first look, not at import."""

    def __init__(self, kind: str, load: Callable[[], None] = lambda: None):
        self.kind = kind
        self._load = load
        self._entries: dict[str, tuple[T, str, tuple[str, str]]] = {}

    def add(self, name: str, thing: T, defined_by: Any = None) -> None:
        """Register ``thing``; ``defined_by`` is the class or function that it was made of, where it is neither.

        The same definition may come again (a module that is imported twice); another one under the same name may not.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a {self.kind} is a non-empty string, not {name!r}")
        user = _registering_module()
        origin, identity = _origin(defined_by or thing, user)
        known = self._entries.get(name)
        if known is not None and known[2] != identity:
            raise ValueError(f'{self.kind} "{name}" is already registered by {known[1]}: choose another for {origin}')
        self._entries[name] = (thing, origin, identity)
        if user is not None:
            registrations.setdefault(user["__name__"], f'{self.kind} "{name}"')

    def __contains__(self, name: str) -> bool:
        self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def get(self, name: str) -> T:
        if name not in self:
            raise ValueError(unknown(self.kind, name, self._entries))
        return self._entries[name][0]

    def names(self) -> list[str]:
        self._load()
        return sorted(self._entries)


def _registering_module() -> dict[str, Any] | None:
    """The globals of the user's module that calls for a registration now; None where it is one of our own."""
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "importlib":  # the import of one of our own modules, whoever asked for it
            return None
        if package != "verl_omni":
            return frame.f_globals
        frame = frame.f_back
    return None


def _origin(thing: Any, user: dict[str, Any] | None) -> tuple[str, tuple[str, str]]:
    """Who defined a thing: in words, and by file, which stays the same where a module has a second name."""
    if not hasattr(thing, "__qualname__"):
        return repr(thing), (repr(thing), "")
    module = thing.__module__
    if user is None or user.get("__name__") != module:
        user = vars(sys.modules[module]) if module in sys.modules else {}
    return f"{module}.{thing.__qualname__}", (user.get("__file__") or module, thing.__qualname__)
