"""Files of other people: what is wrong is one line that names the file, at once."""

import io
import os
import struct
import zlib

import pytest
from PIL import Image

from verl_omni.utils.image_files import opened_image
from verl_omni.utils.json_files import DEEPEST, MOST_BYTES, parse, read_lines, read_object
from verl_omni.utils.regular_files import open_regular

DEEP = "[" * 100_000 + "]" * 100_000


def levels(count):
    return '{"a": ' * (count - 1) + "[]" + "}" * (count - 1)


def huge(path):
    path.touch()
    os.truncate(path, MOST_BYTES + 1)


NO_OBJECT = {
    "nested": (lambda p: p.write_text(DEEP), "nested more than 64 levels deep"),
    "nested a little less": (lambda p: p.write_text(levels(500)), "nested more than 64 levels deep"),
    "endless digits": (lambda p: p.write_text('{"a": ' + "9" * 5000 + "}"), "is no JSON"),
    "Latin-1": (lambda p: p.write_bytes(b'{"a": "\xe9"}'), "text in UTF-8"),
    "UTF-16": (lambda p: p.write_bytes('{"a": 1}'.encode("utf-16")), "text in UTF-8"),
    "huge": (huge, "bytes, more than such a file may have"),
    "a pipe": (os.mkfifo, "is no regular file"),
    "a folder": (lambda p: p.mkdir(), "is no regular file"),
    "a device": (lambda p: p.symlink_to("/dev/zero"), "is no regular file"),
    "a broken link": (lambda p: p.symlink_to("/no/such/file"), "is a broken link"),
    "a loop": (lambda p: p.symlink_to(p), "cannot be opened: Too many levels of symbolic links"),
    "missing": (lambda p: None, "is missing"),
}


@pytest.mark.parametrize("name", NO_OBJECT)
def test_what_is_no_json_object(tmp_path, name):
    make, said = NO_OBJECT[name]
    path = tmp_path / "x.json"
    make(path)
    for read in (read_object, lambda path: list(read_lines(path))):
        if name == "huge" and read is not read_object:
            continue  # there may be many lines
        with pytest.raises((ValueError, FileNotFoundError), match=said) as caught:
            read(path)
        line = str(caught.value)
        assert str(path) in line and "\n" not in line and len(line) < 400


@pytest.mark.parametrize("name", ["x" * 5000, "x\0y"])
def test_names_that_no_file_can_have(name):
    with pytest.raises(ValueError, match="cannot be opened") as caught:
        open_regular(name)
    assert len(str(caught.value)) < 400


def test_as_deep_as_it_may_be():
    assert parse(levels(DEEPEST), "it")
    assert parse("[" + "[], " * 1000 + "[]]", "it"), "many, and none of them deep"
    with pytest.raises(ValueError, match="it is nested more than"):
        parse(levels(DEEPEST + 1), "it")


def test_a_link_to_a_file_is_as_good_as_the_file(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    (tmp_path / "link.json").symlink_to(tmp_path / "x.json")
    assert read_object(tmp_path / "link.json") == {"a": 1}


def png(width, height):
    """A PNG that says so of itself and has no pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


@pytest.mark.parametrize("content", [b"", b"no image", png(60_000, 60_000), png(8, 8), png(8, 8) + b"\0\0\0\1IDAT"])
def test_what_is_no_image(tmp_path, content):
    (tmp_path / "x.png").write_bytes(content)
    for source in (tmp_path / "x.png", content):
        with pytest.raises(ValueError, match="cannot be read as an image: ."), opened_image(source) as image:
            image.convert("RGB")


def test_an_image(tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, "PNG")
    with opened_image(file.getvalue()) as image:
        assert image.convert("RGB").getpixel((0, 0)) == (255, 0, 0)
