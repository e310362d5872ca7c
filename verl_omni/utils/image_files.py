"""Image files of other people: one that is none, or would wait or fill the memory, is one line that names it."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from verl_omni.utils.regular_files import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image


@contextmanager
def opened_image(source: str | Path | bytes) -> Iterator["Image"]:
    """The image in a file, or in its bytes. What PIL raises while it is looked at is a ValueError."""
    from PIL import Image

    with io.BytesIO(source) if isinstance(source, bytes) else open_regular(source) as file:
        try:
            with Image.open(file) as image:
                yield image
        except Exception as error:  # PIL's readers of damaged files raise anything
            what = "the bytes of an image" if isinstance(source, bytes) else str(source)
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"{what} cannot be read as an image: {said}") from error
