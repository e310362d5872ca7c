"""Images inside a page."""

import base64
import io
from pathlib import Path

from verl_omni.utils.image_files import opened_image

THUMBNAIL = 256


def data_uri(path: Path) -> str:
    """Large ones as thumbnails, so that the page stays light; animations as they are."""
    with opened_image(path) as image:
        if image.format == "GIF":
            return "data:image/gif;base64," + base64.b64encode(path.read_bytes()).decode()
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        file = io.BytesIO()
        image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
