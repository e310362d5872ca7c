"""The house: imports go down only, documents name files that exist, and no room holds everything."""

import re
import subprocess
import sys
from pathlib import Path

from verl_omni.report.document_tables import room_lines, rooms_table

ROOT = Path(__file__).parents[1]


def test_imports_go_down_only():
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    run = subprocess.run([sys.executable, "-c", command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and "3 kept, 0 broken" in run.stdout, run.stdout + run.stderr


def test_imports_for_the_sake_of_a_type_count_as_well():
    """A circle of files is one, whether Python or only a reader goes around it."""
    assert "exclude_type_checking_imports = false" in (ROOT / "pyproject.toml").read_text()


def test_the_trainer_reads_from_top_to_bottom():
    lines = (ROOT / "verl_omni/trainer/diffusion/base_trainer.py").read_text().splitlines()
    assert len(lines) < 300 and sum(line.startswith(("import ", "from ")) for line in lines) <= 23


def test_addresses_only_hand_names_on():
    """What documents name besides the rooms has imports and nothing else."""
    text = (ROOT / "pyproject.toml").read_text().split("protected_modules = [")[1].split("]")[0]
    addresses = re.findall(r'"([\w.]+)"', text)
    assert len(addresses) >= 15
    for address in addresses:
        place = ROOT / address.replace(".", "/")
        for file in [*place.rglob("*.py")] if place.is_dir() else [place.with_suffix(".py")]:
            assert not re.search(r"^(def|class|\w+ = (?!\[))", file.read_text(), re.MULTILINE), file


def test_every_folder_says_what_lives_in_it():
    """But for addresses, which are one line themselves."""
    for folder in {file.parent for file in (ROOT / "verl_omni").rglob("*.py")}:
        own = [file for file in folder.glob("*.py") if re.search(r"^(def|class|@|async def) ?", file.read_text(), re.M)]
        if own and "experimental" not in folder.parts[:-1]:
            text = (folder / "README.md").read_text()
            assert 1 < len(text.splitlines()) < 15, folder


def test_the_documents_name_files_that_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`(verl_omni/[\w/]+(?:\.py|/))`", text))
    assert len(named) >= 20
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_table_of_rooms_is_about_right():
    written = dict(re.findall(r"^\| `(\w+)/` .* \| ([\d,]+) \|$", (ROOT / "docs/architecture.md").read_text(), re.M))
    counted = dict(re.findall(r"^\| `(\w+)/` .* \| ([\d,]+) \|$", rooms_table(), re.M))
    assert written.keys() == counted.keys(), "run: python -m verl_omni.report.document_tables docs/architecture.md"
    for room, lines in room_lines().items():
        claimed = int(written[room].replace(",", ""))
        assert abs(claimed - lines) <= max(150, 0.2 * lines), f"{room}: {lines} lines, docs/architecture.md: {claimed}"


def test_no_room_holds_more_than_a_third():
    lines = room_lines()
    assert max(lines.values()) < sum(lines.values()) / 3
