"""What a diffusers folder says that it holds: model_index.json, or modular_model_index.json of a modular pipeline."""

from pathlib import Path
from typing import Any

from verl_omni.utils.json_files import read_object

INDEX, MODULAR = "model_index.json", "modular_model_index.json"
INDEXES = (INDEX, MODULAR)
# MiniMax-H3's second transformer, as large as the first: it draws from references, and nothing here does.
OF_OTHER_TASKS = ("transformer_ref",)


def index_of(folder: str | Path) -> Path:
    """That file; where there is neither, the one that most have."""
    root = Path(folder).expanduser()
    return next((root / name for name in INDEXES if (root / name).is_file()), root / INDEX)


def read_index_file(path: str | Path) -> dict[str, Any]:
    """Each component's [library, class], beside settings.

    A modular index may name another place for each component: here all are read from the folder that holds it.
    """
    found = read_object(path)
    if Path(path).name == INDEX:
        return found
    return {name: _pair(path, name, entry) for name, entry in found.items() if name not in OF_OTHER_TASKS}


def _pair(path: str | Path, name: str, entry: Any) -> Any:
    if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[2], dict):
        return entry
    *pair, told = entry
    if pair == [None, None] and told.get("pretrained_model_name_or_path"):  # saved before anything was loaded
        pair = told.get("type_hint")
    if pair != [None, None] and told.get("subfolder") != name:
        raise ValueError(f'{path} has "{name}" in the folder {told.get("subfolder")!r:.80}: expected "{name}"')
    return pair
