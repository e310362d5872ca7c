"""Compare every architecture with diffusers, and write the largest differences into docs/models.md.

python tests/pipelines/write_parity.py docs/models.md [PYTEST-ARGUMENT...]

Rows that are not measured stay as they are: those of models that this diffusers does not have, or that `-k` leaves out.
"""

import sys
from collections import defaultdict
from pathlib import Path

import pytest

sys.path[:0] = [str(folder) for folder in list(Path(__file__).resolve().parents)[1:3]]  # as pytest does

from test_architectures import TABLE  # noqa: E402

from verl_omni.report.document_tables import fill, rows_of  # noqa: E402

COLUMNS = {"latents": "latents", "decoded": "pixels or samples", "log_prob": "log-probability"}
TESTS = ("test_without_noise_it_is_diffusers", "test_training_finds_the_log_probs_of_the_rollout")


class Differences:
    """A pytest plug-in that keeps what tests recorded of each architecture, where they passed."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call":
            name = architecture_of(report.nodeid.partition("[")[2].rstrip("]"))
            for what, value in report.user_properties:
                self.found[name][what].append(value)


def architecture_of(test: str) -> str:
    """The longest name of a row with which, or after which, a test's own begins."""
    return max((row.name for row in TABLE if f"-{row.name}-" in f"-{test}-"), key=len)


def parity_table(found: dict[str, dict[str, list[float]]], before: dict[str, str]) -> str:
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in TABLE:
        if row.name not in found:
            lines.append(before[row.name])
            continue
        figures = (f"{max(found[row.name][what]):.1e}" for what in COLUMNS)
        lines.append(f"| `{row.name}` | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def main() -> int:
    differences, file = Differences(), Path(__file__).with_name("test_architectures.py")
    page, *more = sys.argv[1:]
    status = pytest.main(["-q", "-m", "", *(f"{file}::{test}" for test in TESTS), *more], plugins=[differences])
    if status == 0:
        text = Path(page).read_text()
        Path(page).write_text(fill(text, "PARITY", parity_table(differences.found, rows_of(text, "PARITY"))))
    return status


if __name__ == "__main__":
    sys.exit(main())
