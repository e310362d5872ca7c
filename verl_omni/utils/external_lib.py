"""Import a user's own modules, which register algorithms, models or rewards."""

import importlib
from typing import Any


def import_external_lib(names: Any) -> None:
    """`names`: null, one dotted module name, or several (a list, or separated by commas)."""
    if not names:
        return
    for name in [names] if isinstance(names, str) and "," not in names else _several(names):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.split(".")[0] and error.name != name:
                raise
            raise ModuleNotFoundError(
                f'actor_rollout_ref.model.external_lib="{name}" cannot be imported: is its folder on PYTHONPATH?'
            ) from error


def _several(names: Any) -> list[str]:
    parts = names.split(",") if isinstance(names, str) else list(names)
    return [part.strip() for part in parts if part.strip()]
