"""JSON files of other people: what is wrong with one is one line that names it."""

import json
from pathlib import Path
from typing import Any


def read_object(path: str | Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}: expected a JSON object, {{...}}")
    return found
