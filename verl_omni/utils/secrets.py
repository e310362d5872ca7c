"""Keys and passwords that a setting names and does not hold: what is typed as an argument, everybody sees in `ps`."""

import os
import re
from typing import Any

from verl_omni.utils.regular_files import open_regular

# Not file://, which is an address.
REFERENCE = re.compile(r"env:[A-Za-z_]\w*|file:(?!//).+")
MOST_BYTES = 2**16


def is_reference(value: Any) -> bool:
    return isinstance(value, str) and REFERENCE.fullmatch(value) is not None


def revealed(tree: Any, where: str) -> Any:
    """Settings with `env:NAME` and `file:PATH` replaced by what the variable or the file holds.

    To be called by the process that uses them: nothing that is revealed may go into a configuration.
    """
    if isinstance(tree, dict):
        return {key: revealed(value, f"{where}.{key}") for key, value in tree.items()}
    if isinstance(tree, list):
        return [revealed(value, where) for value in tree]
    return _look_up(tree, where) if is_reference(tree) else tree


def _look_up(reference: str, where: str) -> str:
    kind, _, name = reference.partition(":")
    if kind == "env":
        found = os.environ.get(name, "").strip()
        if not found:
            raise ValueError(f"{where}={reference}: there is no environment variable {name}, or it is empty")
        return found
    try:
        with open_regular(name) as file:
            found = file.read(MOST_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}={reference}: {error}") from None
    if not found:
        raise ValueError(f"{where}={reference}: the file is empty")
    return found
