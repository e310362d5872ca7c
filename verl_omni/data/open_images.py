"""The images of a prompt, as a data file holds them, to PIL images."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from verl_omni.utils.image_files import opened_image

if TYPE_CHECKING:
    from PIL.Image import Image


def open_images(column: Iterable[Any] | None) -> list["Image"] | None:
    """RGB images from paths, encoded bytes, ``{"bytes": ..., "path": ...}`` as in Hugging Face datasets, or images."""
    if column is None:
        return None
    if isinstance(column, str | bytes | dict):
        column = [column]
    return [_open(item) for item in column]


def check_images(column: Iterable[Any] | None) -> None:
    """Raise one line where `open_images` would fail. Looks at the beginning of each image only."""
    if column is not None:
        for item in [column] if isinstance(column, str | bytes | dict) else column:
            _open(item, convert=False)


def _open(item: Any, convert: bool = True) -> "Image":
    from PIL import Image

    if isinstance(item, Image.Image):
        return item.convert("RGB")
    source = (item.get("bytes") or item.get("path")) if isinstance(item, dict) else item
    if not isinstance(source, str | bytes):
        raise ValueError(
            f"an entry of the column `images` is {type(item).__name__}: expected a path, encoded bytes, or a dict with "
            "`bytes` or `path`"
        )
    try:
        with opened_image(source) as image:
            return image.convert("RGB") if convert else image
    except (OSError, ValueError) as error:
        raise ValueError(f"an image of the column `images` cannot be opened: {error}") from error
