"""Run the matrix of algorithms and architectures, and write what passed into docs/models.md.

python tests/pipelines/write_matrix.py docs/models.md                # every pair
python tests/pipelines/write_matrix.py docs/models.md --missing      # those that the page does not have, or that failed

Rows of models that this diffusers does not have stay as they are.
"""

import argparse
import itertools
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(folder) for folder in list(Path(__file__).resolve().parents)[1:3]]  # as pytest does

from test_architectures import TABLE  # noqa: E402
from test_matrix import ALGORITHMS, FORWARD, REWARD_GRADIENT  # noqa: E402
from tiny_models import is_known  # noqa: E402

from verl_omni.report.document_tables import fill  # noqa: E402

MARKS = {"passed": "✓", "failed": "fails", "skipped": "–"}
Cells = dict[tuple[str, str], str]


class Outcomes:
    """A pytest plug-in that remembers how each test ended, and runs none of the pairs that are there already."""

    def __init__(self, there: Cells) -> None:
        self.there, self.cells = there, dict(there)

    def pytest_collection_modifyitems(self, config, items) -> None:
        left_out = [item for item in items if pair_of(item.nodeid) in self.there]
        items[:] = [item for item in items if pair_of(item.nodeid) not in self.there]
        config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.cells[pair_of(report.nodeid)] = MARKS[report.outcome]


def pair_of(test: str) -> tuple[str, str]:
    """Architecture and algorithm, by a test's own name."""
    row, _, column = test.partition("[")[2].rstrip("]").rpartition("-")
    return row, column


def all_cells() -> list[tuple[str, str]]:
    """In the order of the tests' own tables, not in that in which pytest runs them."""
    return list(itertools.product((row.name for row in TABLE), (*ALGORITHMS, *FORWARD, *REWARD_GRADIENT)))


def matrix_table(cells: Cells) -> str:
    """Architectures down, algorithms across."""
    assert set(cells) == set(all_cells()), "some pairs were not run"
    rows, columns = (list(dict.fromkeys(key[i] for key in all_cells())) for i in range(2))
    lines = ["| | " + " | ".join(f"`{c}`" for c in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| `{row}` | " + " | ".join(cells[row, column] for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def cells_of(text: str) -> Cells:
    """What the page says of pairs that there still are. What failed is not among it."""
    table = text.split("<!-- MATRIX -->\n")[1].split("\n<!-- /MATRIX -->")[0]
    head, _, *lines = ([cell.strip("` ") for cell in line.strip("|").split("|")] for line in table.splitlines())
    found = {(line[0], column): cell for line in lines for column, cell in zip(head[1:], line[1:], strict=True)}
    return {pair: found[pair] for pair in all_cells() if found.get(pair, MARKS["failed"]) != MARKS["failed"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--missing", action="store_true", help="only pairs that the page lacks, or has as failed")
    options = parser.parse_args()
    on_page = cells_of(options.page.read_text())
    outcomes = Outcomes({p: mark for p, mark in on_page.items() if options.missing or not is_known(p[0])})
    if set(outcomes.there) == set(all_cells()):
        print(f"{options.page} has every pair")
        return 0
    status = pytest.main(["-q", "-m", "", str(Path(__file__).with_name("test_matrix.py"))], plugins=[outcomes])
    options.page.write_text(fill(options.page.read_text(), "MATRIX", matrix_table(outcomes.cells)))
    return status


if __name__ == "__main__":
    sys.exit(main())
