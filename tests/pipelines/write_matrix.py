"""Run the matrix of algorithms and architectures, and write what passed into docs/models.md.

python tests/pipelines/write_matrix.py docs/models.md
"""

import itertools
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(folder) for folder in list(Path(__file__).resolve().parents)[1:3]]  # as pytest does

from test_architectures import TABLE  # noqa: E402
from test_matrix import ALGORITHMS, FORWARD  # noqa: E402

from verl_omni.report.document_tables import fill  # noqa: E402

MARKS = {"passed": "✓", "failed": "fails", "skipped": "–"}


class Outcomes:
    """A pytest plug-in that remembers how each test ended."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str], str] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            row, _, column = report.nodeid.partition("[")[2].rstrip("]").rpartition("-")
            self.cells[row, column] = MARKS[report.outcome]


def all_cells() -> list[tuple[str, str]]:
    """In the order of the tests' own tables, not in that in which pytest runs them."""
    return list(itertools.product((row.name for row in TABLE), (*ALGORITHMS, *FORWARD)))


def matrix_table(cells: dict[tuple[str, str], str]) -> str:
    """Architectures down, algorithms across."""
    assert set(cells) == set(all_cells()), "some pairs were not run"
    rows, columns = (list(dict.fromkeys(key[i] for key in all_cells())) for i in range(2))
    lines = ["| | " + " | ".join(f"`{c}`" for c in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| `{row}` | " + " | ".join(cells[row, column] for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    outcomes = Outcomes()
    status = pytest.main(["-q", "-m", "", str(Path(__file__).with_name("test_matrix.py"))], plugins=[outcomes])
    page = Path(sys.argv[1])
    page.write_text(fill(page.read_text(), "MATRIX", matrix_table(outcomes.cells)))
    return status


if __name__ == "__main__":
    sys.exit(main())
