"""Images, sounds and texts inside a page."""

import base64
import io
import wave
from pathlib import Path

from verl_omni.utils.image_files import opened_image
from verl_omni.utils.regular_files import open_regular

THUMBNAIL = 256
MOST_TEXT = 4000  # characters


def data_uri(path: Path) -> str:
    """Large ones as thumbnails, so that the page stays light; animations as they are."""
    with opened_image(path) as image:
        if image.format == "GIF":
            return "data:image/gif;base64," + base64.b64encode(path.read_bytes()).decode()
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        file = io.BytesIO()
        image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def sound_data(path: Path) -> str:
    """The bytes of a wav file, which a page plays by itself."""
    with open_regular(path) as file:
        content = file.read()
    try:
        with wave.open(io.BytesIO(content)) as sound:
            sound.getparams()
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{path} cannot be read as a sound: {error or 'it is cut off'}") from error
    return base64.b64encode(content).decode()


def text_in(path: Path) -> str:
    """A long one as its beginning."""
    with open_regular(path) as file:
        text = file.read(4 * MOST_TEXT).decode(errors="replace")
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " ..."
