"""Who may read what a run writes."""

from pathlib import Path


def share(folder: str | Path) -> None:
    """Give the files below a new folder the access of the folder: safetensors writes for the owner only."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            share_file(path)


def share_file(path: Path) -> None:
    path.chmod(path.parent.stat().st_mode & 0o666)
