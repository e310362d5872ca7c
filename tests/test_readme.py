"""The README says what is there."""

import re
from pathlib import Path

from verl_omni.report.document_tables import fill, models_table

ROOT = Path(__file__).parent.parent


def test_the_table_of_models_is_the_registry():
    text = (ROOT / "docs/models.md").read_text()
    fresh = fill(text, "MODELS", models_table())
    assert fresh == text, "run: python -m verl_omni.report.document_tables docs/models.md"


def test_every_algorithm_of_the_readme_is_registered():
    from verl_omni.algorithms.registry import get_algorithm

    section = (ROOT / "README.md").read_text().split("## Algorithms")[1].split("##")[0]
    names = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert len(names) >= 8
    for name in names:
        assert get_algorithm(name).name == name
