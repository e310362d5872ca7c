"""What a run has left in its folder, read back; what is damaged is one line that names the file."""

from pathlib import Path
from typing import Any

from verl_omni.utils.json_files import MOST_BYTES, parse_object
from verl_omni.utils.regular_files import open_regular

PROGRESS = "progress.json"
# What people ask of a run by a file in its folder, which it looks for between steps.
STOP, SAVE = "stop.request", "save.request"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The entries of a ``metrics.jsonl``. A last line without its end, left by a killed run, is not an entry."""
    with open_regular(path) as file:
        *whole, _unfinished = file.read().split(b"\n")
    entries = []
    for number, line in enumerate(whole, start=1):
        try:
            entry = parse_object(line, f"line {number}")
            if type(entry.get("step")) is not int or not isinstance(entry.get("data"), dict):
                raise ValueError(f'line {number} is not {{"step": ..., "data": {{...}}}}')
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}. Move it away to go on without the old metrics") from error
        entries.append(entry)
    return entries


def read_config(path: str | Path) -> dict[str, Any]:
    """The tree of a ``config.yaml``."""
    import yaml

    with open_regular(path) as file:
        text = file.read(MOST_BYTES)
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())[:200]}") from error
    except RecursionError:
        raise ValueError(f"{path} is nested too deep for a configuration") from None
    if not isinstance(found, dict | None):
        raise ValueError(f"{path} holds a {type(found).__name__}: expected the settings of a run")
    return found or {}
