"""Who may read what a run writes."""

from pathlib import Path


def share(folder: str | Path) -> None:
    """Give the files below a new folder the access of the folder: safetensors writes for the owner only."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            path.chmod(path.parent.stat().st_mode & 0o666)
