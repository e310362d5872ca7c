"""A model's folder is data. What in it would make a library import, download or run something is refused unread."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from verl_omni.utils.folders import visible_files
from verl_omni.utils.json_files import read_object
from verl_omni.utils.model_index import INDEXES, read_index_file

LIBRARIES = ("diffusers", "transformers")
PROGRAMS = (".py", ".pyc", ".pyd", ".so", ".dll", ".dylib")
# transformers would load another model, from wherever this says, below it.
ADAPTER = "adapter_config.json"
# Each names code beside the weights, or on the hub, that a loader then asks about or runs.
CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipeline", "custom_pipelines", "auto_mapping", "parent_library")


def refuse_code(folder: str | Path, libraries: Collection[str] = LIBRARIES, programs: bool = False) -> None:
    """One line that names the file, where something in a model's folder is not data.

    `libraries` are those that its model_index.json may name: diffusers imports any that stands there. With `programs`,
    files may lie there that are some, where nothing names them.
    """
    root = Path(folder).expanduser()
    for path in visible_files(root):
        if path.suffix in PROGRAMS and not programs:
            raise ValueError(f"{path} is a program, and a model's folder holds data only: take it away")
        if path.name == ADAPTER or (path.name in INDEXES and path.parent != root):
            raise ValueError(f"{path} would have another model loaded from inside this one: take it away")
        if path.name in INDEXES:
            _check_libraries(path, read_index_file(path), libraries)
        if path.name in INDEXES or path.name.endswith("config.json"):
            for key, value in _entries(read_object(path)):
                _check_entry(path, key, value)


def _check_libraries(path: Path, index: dict[str, Any], libraries: Collection[str]) -> None:
    for name, entry in index.items():
        library = entry[0] if isinstance(entry, list) and entry and not name.startswith("_") else None
        if isinstance(library, str) and library not in libraries:
            raise ValueError(
                f'{path} has "{name}" from the library {library!r:.60}, which would be imported: expected '
                f"{' or '.join(libraries)}, or an adapter whose `libraries` name it"
            )


def _check_entry(path: Path, key: str, value: Any) -> None:
    if key in CODE_KEYS and value:
        raise ValueError(f'{path} has "{key}": {value!r:.80}, which names code to run: take it out')
    if key == "configuration_files":
        raise ValueError(f'{path} has "{key}": {value!r:.80}, which are read in its place: take it out')
    if key == "_class_name" and not isinstance(value, str):
        raise ValueError(f'{path} has "_class_name": {value!r:.80}: expected one name, and not code of its own')
    # transformers takes kernels, which are programs, from the hub where the name is that of a repository.
    if key.strip("_").removesuffix("_internal").endswith("_implementation") and "/" in str(value):
        raise ValueError(f'{path} has "{key}": {value!r:.80}, a kernel that would be downloaded and run: take it out')


def _entries(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every key at any depth."""
    if isinstance(tree, dict):
        yield from tree.items()
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _entries(value)
