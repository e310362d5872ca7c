"""What README.md says holds a fault is there."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent


def test_the_test_of_each_fault_is_there():
    rows = [line for line in (HERE / "README.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        ((path, name),) = re.findall(r"`(tests/\S+\.py)::(\w+)`", row)
        tree = ast.parse((HERE.parents[1] / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row
