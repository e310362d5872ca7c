import io

import pytest
from PIL import Image

from verl_omni.data.open_images import open_images

RED = Image.new("RGB", (3, 2), "red")


def png() -> bytes:
    buffer = io.BytesIO()
    RED.save(buffer, "PNG")
    return buffer.getvalue()


def test_every_form_of_an_image(tmp_path):
    path = tmp_path / "red.png"
    path.write_bytes(png())
    forms = [str(path), png(), {"bytes": png(), "path": None}, {"bytes": None, "path": str(path)}, RED]
    assert [image.tobytes() for image in open_images(forms)] == [RED.tobytes()] * len(forms)
    assert open_images(str(path))[0].size == (3, 2)


def test_images_are_rgb_and_may_be_missing():
    assert open_images([Image.new("LA", (1, 1))])[0].mode == "RGB"
    assert open_images(None) is None


@pytest.mark.parametrize("bad, words", [("/nowhere.png", "/nowhere.png"), (b"no image", "cannot"), (7, "is int")])
def test_what_is_no_image_says_so(bad, words):
    with pytest.raises(ValueError, match=words):
        open_images([bad])
