"""JSON of strangers: what would take much memory is refused before it is built.

A request of 120 MB can be 40 million empty lists, of 3 GB, or lists in lists without end. Everything that JSON is built
of begins at a mark, so that bytes can be counted as they arrive, and no object takes more than some 70 bytes a mark.
"""

import json
import re
from typing import Any

from verl_omni.utils.errors import Refused

# Begin a value or a name, or stand for a character in a text (`\u00e9`).
MARKS = b',[{"\\'
MOST_MARKS, MOST_DEPTH = 2**19, 32

_OUTSIDE, _IN_TEXT = re.compile(rb'["\[\]{}]'), re.compile(rb'["\\]')


class MarkCounter:
    """Counts the marks of a body that comes in parts; too many are refused."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, part: bytes) -> None:
        self.count += len(part) - len(part.translate(None, MARKS))
        if self.count > MOST_MARKS:
            raise Refused(413, f"the JSON of the request has more than {MOST_MARKS} values and escapes: send less")


def loads(body: bytes | bytearray) -> Any:
    """The value. ValueError where it is no JSON in UTF-8, is nested too deeply, or has texts that UTF-8 cannot hold."""
    if depth_is_beyond(body, MOST_DEPTH):
        raise ValueError(f"nested more than {MOST_DEPTH} deep")
    value = json.loads(body.decode())
    if b"\\u" in body:  # no other way leads to half of a character
        check_texts(value)
    return value


def check_texts(value: Any) -> None:
    """JSON can say `"\\ud800"`, half of a character, which no tokenizer takes and no answer can repeat."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one
        elif isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError as error:
                half = f"\\u{ord(one[error.start]):x}"
                raise ValueError(f"a text has {half}, which is half of a character") from error


def depth_is_beyond(body: bytes | bytearray, most: int) -> bool:
    """Whether brackets outside of texts are open more than `most` deep, without building anything."""
    depth, at = 0, 0
    while 0 <= depth <= most and (found := _OUTSIDE.search(body, at)):
        at = found.end()
        if found[0] in b"[{":
            depth += 1
        elif found[0] in b"]}":
            depth -= 1
        else:
            while (inner := _IN_TEXT.search(body, at)) and inner[0] == b"\\":
                at = inner.end() + 1
            if inner is None:
                return False
            at = inner.end()
    return depth > most
