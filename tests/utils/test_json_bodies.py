"""JSON of strangers. What is deep, and which texts there are, is asked of Python's own json and codecs."""

import json
import random

import pytest

from verl_omni.utils.errors import Refused
from verl_omni.utils.json_bodies import MOST_MARKS, MarkCounter, depth_is_beyond, loads


def depth(value) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict | list)) + max(map(depth, inner), default=0)


def any_value(draw: random.Random, room: int):
    kinds = ["text", "number", "list", "object"] if room else ["text", "number"]
    match draw.choice(kinds):
        case "text":
            return "".join(draw.choices('ab[]{}",\\\n€é😀', k=draw.randrange(6)))
        case "number":
            return draw.choice([0, -1.5, 1e300, True, None])
        case "list":
            return [any_value(draw, room - 1) for _ in range(draw.randrange(4))]
    return {str(any_value(draw, 0)): any_value(draw, room - 1) for _ in range(draw.randrange(4))}


@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_depth_is_seen_without_building(ascii_only):
    draw = random.Random(0)
    for _ in range(500):
        value = any_value(draw, 6)
        body = json.dumps(value, ensure_ascii=ascii_only).encode()
        deep = depth(value)
        assert not depth_is_beyond(body, deep) and (deep == 0 or depth_is_beyond(body, deep - 1)), body
        assert loads(body) == loads(bytearray(body)) == value


@pytest.mark.parametrize("body", [b"]" * 10**6, b'"' + b"]" * 10**6, b'"\\', b"[" * 10**6, b"", b'"\xff"', b"\x00["])
def test_what_is_no_json_is_one_error(body):
    with pytest.raises(ValueError):
        loads(body)


@pytest.mark.parametrize("text", [r'"\ud800"', r'{"\udc00": 1}', r'[["a\udfffb"]]', r'"\ude00\ud83d"'])
def test_half_of_a_character_is_an_error(text):
    with pytest.raises(UnicodeEncodeError):
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    with pytest.raises(ValueError, match="half of a character"):
        loads(text.encode())


def test_no_object_has_fewer_marks_than_it_costs():
    """Every value, name and escape has one, in whichever parts they come."""
    counter = MarkCounter()
    for part in (b'{"a": [1, 2, {}', b'], "b', b'": "\\n"}'):
        counter.add(part)
    assert counter.count >= 7
    counter = MarkCounter()
    counter.add(b"[" * MOST_MARKS)
    with pytest.raises(Refused, match="more than 524288 values") as refused:
        counter.add(b",")
    assert refused.value.status == 413
