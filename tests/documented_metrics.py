"""Which names docs/metrics.md has: every run of a test that reads its metrics asks."""

import functools
import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
# What losses and callbacks report that tests write as a user would.
OF_TESTS = re.compile(r"actor/(doubled|weight_mean)|mine/double")


@functools.cache
def names() -> tuple[str, ...]:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    return tuple(name for row in rows for name in re.findall(r"`([^`]+)`", row))


@functools.cache
def pattern() -> re.Pattern:
    """`reward/<name>/mean` stands for any word there, which may have slashes of its own."""
    return re.compile("|".join(re.sub(r"<[^>]+>", ".+", re.escape(name)) for name in names()))


def unknown(found: Iterable[str]) -> list[str]:
    return [name for name in found if not pattern().fullmatch(name) and not OF_TESTS.fullmatch(name)]
