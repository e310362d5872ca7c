"""JSON of other people: what is wrong with it is one line that names it, and none of it can hang or swamp a process."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_omni.utils.regular_files import open_regular

DEEPEST = 64  # levels: code that walks through what was read takes a few frames of Python's stack for each
MOST_BYTES = 2**26  # of a file that is read as a whole


def parse(text: str | bytes, where: str) -> Any:
    """What JSON says, or a ValueError whose line begins with `where`."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        found = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no JSON, which is text in UTF-8: {error}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested more than {DEEPEST} levels deep") from None
    except ValueError as error:  # a number of thousands of digits is one too
        raise ValueError(f"{where} is no JSON: {error}") from None
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(found):
        raise ValueError(f"{where} is nested more than {DEEPEST} levels deep")
    return found


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    found = parse(text, where)
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds a {type(found).__name__}: expected a JSON object, {{...}}")
    return found


def read_object(path: str | Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise ValueError(f"{path} has {size} bytes, more than such a file may have ({MOST_BYTES})")
        return parse_object(file.read(MOST_BYTES), str(path))


def read_lines(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, the object) for each line of a JSONL file that is not empty."""
    with open_regular(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, parse_object(line, where)


def _is_deep(found: Any) -> bool:
    level = [found]
    for _ in range(DEEPEST):
        level = [v for c in level if isinstance(c, dict | list) for v in (c.values() if isinstance(c, dict) else c)]
    return any(isinstance(value, dict | list) for value in level)
