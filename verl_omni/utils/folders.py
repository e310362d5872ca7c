"""What lies below a folder of other people, as those see it who load it: links to folders are followed."""

import os
from collections.abc import Iterator
from pathlib import Path


def visible_files(root: Path) -> Iterator[Path]:
    """All but hidden ones, which nobody loads. A folder that several links lead to is looked into once."""
    seen, waiting = set(), [(root, (os.path.realpath(root),))] if root.is_dir() else []
    while waiting:
        folder, inside = waiting.pop()
        try:
            below = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        except OSError as error:
            raise ValueError(f"{str(folder)[:200]} cannot be listed: {error.strerror}") from None
        for path in below:
            if not path.is_dir():
                yield path
                continue
            real = os.path.realpath(path)
            if real in inside:
                raise ValueError(f"{path} is a link to a folder that it lies in: take it away")
            if real not in seen:
                seen.add(real)
                waiting.append((path, (*inside, real)))
