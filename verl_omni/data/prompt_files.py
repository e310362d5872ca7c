"""Rows of prompts, from the files that people have: parquet, JSONL, a text, a folder of images with captions."""

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_omni.utils import hub
from verl_omni.utils.json_files import read_lines
from verl_omni.utils.regular_files import open_regular
from verl_omni.utils.suggest import nearest

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
KINDS = "file.parquet, file.jsonl, prompts.txt or hf://datasets/OWNER/NAME/FILE"
CAPTIONS = ("prompt", "text", "caption")  # what people call it


class RowFile:
    """The rows of one file: decoded one by one on access, so that embedded images do not fill the memory as objects."""

    def __init__(self, path: Path, columns: list[str]):
        self.path, self.columns = path, columns

    def require(self, name: str) -> None:
        if name not in self.columns:
            raise ValueError(
                f'{self.path} has no column "{name}".{nearest(name, self.columns)}'
                f" Columns there: {', '.join(self.columns)}"
            )

    def refuse_misspelt(self, name: str) -> None:
        """A column that a row may do without, and that is there under a name very like it."""
        like = difflib.get_close_matches(name, self.columns, n=1, cutoff=0.85)
        if name not in self.columns and like:
            raise ValueError(f'{self.path} has a column "{like[0]}": is it "{name}"? Rename it to what it is')


class _Parquet(RowFile):
    def __init__(self, path: Path):
        try:
            self.table = pq.read_table(path)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
            raise ValueError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from error
        super().__init__(path, self.table.column_names)

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> dict:
        return self.table.slice(index, 1).to_pylist()[0]

    def scan(self, names: Iterable[str], at_once: int = 1024) -> Iterator[tuple[str, dict]]:
        part = self.table.select([name for name in names if name in self.columns])
        rows = (row for batch in part.to_batches(max_chunksize=at_once) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield f"{self.path}, row {number}", {name: row.get(name) for name in names}


class _Rows(RowFile):
    """Rows that are small: (where each stands, for messages, and the row)."""

    def __init__(self, path: Path, rows: Iterable[tuple[str, dict]]):
        self.rows = list(rows)
        super().__init__(path, list(dict.fromkeys(name for _, row in self.rows for name in row)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return dict(self.rows[index][1])

    def scan(self, names: Iterable[str], at_once: int = 1024) -> Iterator[tuple[str, dict]]:
        for where, row in self.rows:
            yield where, {name: row.get(name) for name in names}


def _json_lines(path: Path) -> _Rows:
    return _Rows(path, read_lines(path))


def _text(path: Path) -> _Rows:
    """A prompt a line; empty lines are none."""
    try:
        with open_regular(path) as file:
            lines = file.read().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error
    found = ((number, line.strip()) for number, line in enumerate(lines, start=1))
    return _Rows(path, [(f"{path}, line {number}", {"prompt": line}) for number, line in found if line])


def _captioned(folder: Path) -> _Rows:
    """Images, each with its caption in a .txt of the same name, or all of them in metadata.jsonl.

    The caption is the prompt, and the image's path reaches the reward as `extra_info["image"]`.
    """
    metadata, rows = folder / "metadata.jsonl", []
    if metadata.is_file():
        for where, row in read_lines(metadata):
            caption = next((row[name] for name in CAPTIONS if row.get(name)), None)
            name = row.get("file_name")
            if caption is None or not isinstance(name, str):
                raise ValueError(f"{where}: expected file_name and one of {', '.join(CAPTIONS)}")
            if not (folder / name).is_file():
                raise ValueError(f"{where}: {folder / name} is not there")
            rest = {key: value for key, value in row.items() if key not in ("file_name", *CAPTIONS)}
            rows.append((where, rest | {"prompt": caption, "image": str(folder / name)}))
        return _Rows(folder, rows)
    for image in sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGES):
        caption = image.with_suffix(".txt")
        if not caption.is_file():
            raise ValueError(f"{image} has no caption: expected its prompt in {caption.name} beside it")
        rows.append((str(caption), {"prompt": caption.read_text(encoding="utf-8").strip(), "image": str(image)}))
    if not rows:
        raise ValueError(
            f"{folder} is a folder without images and captions: expected a.png with a.txt, ..., or metadata.jsonl; or "
            f"name a file, {KINDS}"
        )
    return _Rows(folder, rows)


_READERS = {".parquet": _Parquet, ".jsonl": _json_lines, ".txt": _text}


def read_files(data_files: Any, key: str) -> list[RowFile]:
    """Those that the setting `key` names: one, or several."""
    return [read_file(path, key) for path in local_files(data_files, key)]


def local_files(data_files: Any, key: str) -> list[Path]:
    """Where they are on this machine; those of a data set on the hub are downloaded once."""
    if isinstance(data_files, str | Path):
        data_files = [data_files]
    if not data_files:
        raise ValueError(f"no prompts given: set {key}=<{KINDS}>")
    found = (hub.data_files(path, key) if hub.is_data(path) else [Path(path).expanduser()] for path in data_files)
    return [path for paths in found for path in paths]


def first_row(data_files: Any, key: str) -> tuple[dict[str, Any], list[str]]:
    """The first row alone, and the columns of its file."""
    path = local_files(data_files, key)[0]
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=1))
            return batch.to_pylist()[0], batch.schema.names
    file = read_file(path, key)
    return file[0], file.columns


def read_file(path: Path, key: str) -> RowFile:
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}. Set {key}=<{KINDS}> to one that is there")
    if path.is_dir():
        if any(path.glob("*.parquet")) or (any(path.glob("*.jsonl")) and not (path / "metadata.jsonl").is_file()):
            raise ValueError(f"{path} is a folder: set {key} to the .parquet or .jsonl files in it")
        return _captioned(path)
    if path.suffix not in _READERS:
        raise ValueError(f'{path}: files of type "{path.suffix}" are not read; {key} takes {", ".join(_READERS)}')
    file = _READERS[path.suffix](path) if path.stat().st_size else None
    if not file or not len(file):
        raise ValueError(f"{path} is empty: {key} needs at least one prompt")
    return file
