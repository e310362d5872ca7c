"""Which adapter serves an architecture under an algorithm."""

import importlib
from collections.abc import Mapping

from verl_omni.algorithms.registry import get_algorithm, name_algorithm
from verl_omni.utils.registry import Registry
from verl_omni.utils.suggest import YOUR_OWN, unknown


class AdapterRegistry:
    """(architecture, algorithm) -> adapter. The exact pair comes first, then the pair of the algorithm's family.

    `builtin` names the package that registers our own adapters of an architecture. It is imported before anything is
    looked up or added there, so that what is found does not depend on who came first.
    """

    def __init__(self, kind: str, builtin: Mapping[str, str] | None = None):
        self.kind, self.builtin = kind, builtin or {}
        self.adapters: dict[str, Registry[type]] = {}

    def add(self, architecture: str, algorithm: str, cls: type) -> None:
        if not cls.__module__.startswith("verl_omni."):
            self._load(architecture)
        kind = f"{self.kind} adapter of {architecture} for algorithm"
        self.adapters.setdefault(architecture, Registry(kind)).add(algorithm, cls)
        name_algorithm(algorithm)

    def find(self, architecture: str, algorithm: str) -> type:
        self._load(architecture)
        if architecture not in self.adapters:
            known = {*self.adapters, *self.builtin}
            raise ValueError(unknown(f"{self.kind} architecture", architecture, known) + YOUR_OWN)
        adapters, family = self.adapters[architecture], get_algorithm(algorithm).adapter
        for name in (algorithm, family):
            if name is not None and name in adapters:
                return adapters.get(name)
        raise ValueError(
            f'{architecture} has no {self.kind} adapter for algorithm "{algorithm}", only for '
            f'{", ".join(adapters)}: register one with algorithm="{family or algorithm}"'
        )

    def known_algorithms(self, architecture: str) -> list[str]:
        """Those that it has adapters for."""
        self._load(architecture)
        return self.adapters[architecture].names()

    def _load(self, architecture: str) -> None:
        if architecture in self.builtin:
            importlib.import_module(self.builtin[architecture])
