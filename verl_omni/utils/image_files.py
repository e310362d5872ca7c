"""Image files of other people: one that is none, or would wait or fill the memory, is one line that names it."""

import importlib.util
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


def frames_in(path: str | Path) -> Iterator["Image"]:
    """The picture in a file, or one after another those of an animation or of an mp4 file."""
    from PIL import ImageSequence

    if Path(path).suffix.lower() != ".mp4":
        with opened_image(path) as image:
            for frame in ImageSequence.Iterator(image):
                yield frame.convert("RGB")
        return
    from verl_omni.utils.movies import frames_of

    with opened_mp4(path) as content:
        yield from frames_of(content)


@contextmanager
def opened_mp4(path: str | Path) -> Iterator[bytes]:
    """What is in an mp4 file. What its codec raises while it is looked at is a ValueError."""
    if importlib.util.find_spec("av") is None:
        raise ValueError(f"{path} is read with the package av, which is not installed: pip install 'verl-omni[video]'")
    with open_regular(path) as file:
        content = file.read()
    try:
        yield content
    except Exception as error:  # whatever a codec finds wrong with a file
        raise ValueError(f"{path} cannot be read as a video: {type(error).__name__}: {error}") from error
