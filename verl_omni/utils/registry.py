"""Names that users can add to: no enum, no allow-list, and a clear line for a name that is not there."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from verl_omni.utils.suggest import unknown

T = TypeVar("T")


def _origin(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}" if hasattr(thing, "__qualname__") else repr(thing)


class Registry(Generic[T]):
    """Name -> thing. ``load`` brings in the built-in entries and runs at the first look, not at import."""

    def __init__(self, kind: str, load: Callable[[], None] = lambda: None):
        self.kind = kind
        self._load = load
        self._entries: dict[str, tuple[T, str]] = {}

    def add(self, name: str, thing: T, defined_by: Any = None) -> None:
        """Register ``thing``; ``defined_by`` is the class or function that it was made of, where it is neither.

        The same definition may come again (a module that is imported twice); another one under the same name may not.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a {self.kind} is a non-empty string, not {name!r}")
        origin = _origin(defined_by or thing)
        known = self._entries.get(name)
        if known is not None and known[1] != origin:
            raise ValueError(f'{self.kind} "{name}" is already registered by {known[1]}: choose another for {origin}')
        self._entries[name] = (thing, origin)

    def __contains__(self, name: str) -> bool:
        self._load()
        return name in self._entries

    def get(self, name: str) -> T:
        if name not in self:
            raise ValueError(unknown(self.kind, name, self._entries))
        return self._entries[name][0]

    def names(self) -> list[str]:
        self._load()
        return sorted(self._entries)
