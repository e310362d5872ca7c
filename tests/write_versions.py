"""Run tests, and write into docs/versions.md what they ran with and how many passed.

python tests/write_versions.py LABEL PYTEST-ARGUMENT...
"""

import platform
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from verl_omni.report.document_tables import fill

PAGE = Path(__file__).parent.parent / "docs" / "versions.md"
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "ray", "numpy", "pandas", "verl", "vllm-omni")
OUTCOMES = ("passed", "skipped", "failed")


class Outcomes:
    """A pytest plug-in that counts how tests ended; one whose set-up or end fails has failed."""

    def __init__(self) -> None:
        self.of_tests: dict[str, str] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.of_tests[report.nodeid] = report.outcome

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.of_tests[report.nodeid] = "failed"


def installed(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "–"


def with_row(table: str, label: str, outcomes: Counter) -> str:
    """The table with this run's row, in the place of an earlier one of the same label."""
    header = ["tests", "Python", *PACKAGES, *OUTCOMES]
    rows = {line.split("|")[1].strip(): line for line in table.splitlines()[2:]}
    cells = [platform.python_version(), *map(installed, PACKAGES), *(str(outcomes[name]) for name in OUTCOMES)]
    rows[label] = f"| {label} | {' | '.join(cells)} |"
    return "\n".join([f"| {' | '.join(header)} |", "|---" * len(header) + "|", *rows.values()])


def write(label: str, outcomes: Counter) -> None:
    text = PAGE.read_text()
    table = text.partition("<!-- VERSIONS -->\n")[2].partition("<!-- /VERSIONS -->")[0]
    PAGE.write_text(fill(text, "VERSIONS", with_row(table, label, outcomes)))


def main() -> int:
    label, *arguments = sys.argv[1:]
    outcomes = Outcomes()
    status = pytest.main(arguments, plugins=[outcomes])
    write(label, Counter(outcomes.of_tests.values()))
    return status


if __name__ == "__main__":
    sys.exit(main())
