"""Columns on the screen."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """One line a row; every column as wide as its longest cell, the last as it comes."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)
