"""Tables of the README and of pages in docs/, generated from what there is.

python -m verl_omni.report.document_tables README.md docs/*.md     # writes them in
"""

import importlib
import inspect
import re
import sys
from pathlib import Path

import verl_omni

MOST_LINES = 120  # of an adapter, without a word about them
WHY_MORE = f"More than {MOST_LINES} lines: "


def models_table() -> str:
    """One row a built-in architecture, with the first words of its adapter's description, and how long the file is."""
    from verl_omni.pipelines.builtin import BUILTIN
    from verl_omni.pipelines.model_base import DiffusionModelBase

    rows = [f"| pipeline class | model | adapter | lines | why more than {MOST_LINES} |", "|---|---|---|---|---|"]
    for architecture, package in sorted(BUILTIN.items()):
        importlib.import_module(package)
        adapter = DiffusionModelBase.registry.find(architecture, "flow_grpo")
        module = inspect.getmodule(adapter)
        model = re.split(r"[:\n]", module.__doc__)[0].strip()
        path = module.__name__.replace(".", "/") + ".py"
        lines, why = len(Path(module.__file__).read_text().splitlines()), _why_more(Path(module.__file__).parent)
        if bool(why) != (lines > MOST_LINES):
            raise ValueError(f"{path} has {lines} lines: its README.md says why where they are more than {MOST_LINES}")
        rows.append(f"| `{architecture}` | {model} | `{path}` | {lines} | {why} |")
    return "\n".join(rows)


def _why_more(folder: Path) -> str:
    """What the README of an adapter's folder says of its length."""
    paragraphs = (" ".join(one.split()) for one in (folder / "README.md").read_text().split("\n\n"))
    said = [one.removeprefix(WHY_MORE).rstrip(".") for one in paragraphs if one.startswith(WHY_MORE)]
    return said[0] if said else ""


def room_lines() -> dict[str, int]:
    """Lines of Python in each room. Addresses that only hand names on are no room."""
    package = Path(verl_omni.__file__).parent
    rooms = [folder for folder in package.iterdir() if (folder / "__init__.py").exists()]
    lines = {room.name: sum(len(f.read_text().splitlines()) for f in room.rglob("*.py")) for room in rooms}
    return {room: count for room, count in sorted(lines.items(), key=lambda item: -item[1]) if room != "reward_loop"}


def rooms_table() -> str:
    """One row a room: its own description, and its lines to the nearest hundred."""
    rows = ["| room | what is in it | lines, about |", "|---|---|---|"]
    for room, lines in room_lines().items():
        about = importlib.import_module(f"verl_omni.{room}").__doc__.strip().splitlines()[0]
        rows.append(f"| `{room}/` | {about} | {max(100, round(lines, -2)):,} |")
    return "\n".join(rows)


def knobs_table() -> str:
    """Every setting, by section, as the dataclasses declare it."""
    from verl_omni.config.knob import typed, walk
    from verl_omni.config.schema import DiffusionTrainerConfig
    from verl_omni.config.sections import SECTIONS, is_in

    knobs = list(walk(DiffusionTrainerConfig))
    parts = [f"{len(knobs)} settings."]
    for section, about in SECTIONS.items():
        parts += [f"\n## {section}\n", f"{about[0].upper()}{about[1:]}.\n", "| setting | default | |", "|---|---|---|"]
        inside = [knob for knob in knobs if is_in(knob.name, section)]
        parts += [f"| `{k.name}` | {_cell(typed(k.default))} | {_prose(k.text())} |" for k in inside]
    return "\n".join(parts)


def _cell(value: str) -> str:
    return f"`{value}`".replace("|", "\\|") if value else ""


def _prose(text: str) -> str:
    """As it is: what Markdown would take for marks of its own is escaped."""
    return re.sub(r"([|*<>\[\]_])", r"\\\1", text)


TABLES = {"MODELS": models_table, "ROOMS": rooms_table, "KNOBS": knobs_table}


def fill(text: str, name: str, table: str) -> str:
    """The text with ``table`` between its marks ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the text has no <!-- {name} --> ... <!-- /{name} --> to fill")
    return pattern.sub(lambda m: m[1] + table + "\n" + m[2], text)


def rows_of(text: str, name: str) -> dict[str, str]:
    """The lines of a table that `fill` has written, by what stands in backticks at their beginning."""
    table = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    return dict(re.findall(r"^(?=\| `([^`]+)`)(.*)$", table, re.MULTILINE))


if __name__ == "__main__":
    for document in map(Path, sys.argv[1:]):
        text = document.read_text()
        for name, table in TABLES.items():
            if f"<!-- {name} -->" in text:
                text = fill(text, name, table())
        document.write_text(text)
