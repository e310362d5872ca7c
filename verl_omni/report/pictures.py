"""Images inside a page."""

import base64
import io
from pathlib import Path

THUMBNAIL = 256


def data_uri(path: Path) -> str:
    """Large ones as thumbnails, so that the page stays light; animations as they are."""
    if path.suffix == ".gif":
        return "data:image/gif;base64," + base64.b64encode(path.read_bytes()).decode()
    from PIL import Image

    with Image.open(path) as image:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        file = io.BytesIO()
        image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
