"""Files that other people named: opening one never waits, as a named pipe would, and never ends in a traceback."""

import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | Path) -> BinaryIO:
    """A regular file, or a link to one, for reading; anything else is one line that names it."""
    path = Path(path).expanduser()
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is {'a broken link' if path.is_symlink() else 'missing'}") from None
    except (OSError, ValueError) as error:  # the latter for a null byte in the name
        raise ValueError(f"{str(path)[:200]} cannot be opened: {getattr(error, 'strerror', error)}") from None
    file = os.fdopen(handle, "rb") if stat.S_ISREG(os.fstat(handle).st_mode) else None
    if file is None:
        os.close(handle)
        raise ValueError(f"{path} is no regular file")
    return file
