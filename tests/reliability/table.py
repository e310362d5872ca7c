"""The results of a trial as Markdown."""

import re
from typing import Any

SHOWN = 180  # characters of a line in a cell


def cell(text: str) -> str:
    """As code in a table; folders of the trial and long lines are shortened."""
    text = re.sub(r"/\S*?/trial-\w+/[\w.-]+", "…", text)
    text = re.sub(r"/tmp/[\w.-]+(?=/|\b)", "…", text).replace("|", "\\|").replace("`", "'")
    return f"`{text if len(text) <= SHOWN else text[: SHOWN - 1] + '…'}`" if text else "–"


def themes(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list] = {}
    for result in results:
        found.setdefault(result["theme"], []).append(result)
    return found


def inputs_table(results: list[dict[str, Any]]) -> str:
    lines = [tally(results), ""]
    for theme, rows in themes(results).items():
        lines += [f"### {theme}", "", "| what was wrong | what the user sees | s | exit |", "|---|---|---|---|"]
        lines += [f"| {name(r)} | {cell(r['line'])} | {r['seconds']:.0f} | {r['code']} |" for r in rows]
        lines.append("")
    return "\n".join(lines).rstrip()


def faults_table(results: list[dict[str, Any]]) -> str:
    lines = [tally(results), ""]
    for theme, rows in themes(results).items():
        lines += [f"### {theme}", "", "| when | what the user sees | s | exit | what was lost |", "|---" * 5 + "|"]
        lines += [fault_row(r) for r in rows]
        lines.append("")
    return "\n".join(lines).rstrip()


def fault_row(r: dict[str, Any]) -> str:
    if "skipped" in r:
        return f"| {r['name']} | not tried: {r['skipped']} | | | |"
    silent = "an ordinary run" if r["code"] == 0 else "nothing: there is nobody to say it to"
    seen = cell(r["line"]) if r["line"] else silent
    return f"| {name(r)} | {seen} | {r['seconds']:.0f} | {ended(r['code'])} | {lost(r)} |"


def name(r: dict[str, Any]) -> str:
    return r["name"].replace("|", "\\|") + ("" if r["passed"] else f" **fails: {'; '.join(r['why'])[:200]}**")


def ended(code: int | None) -> str:
    return "–" if code is None else f"signal {-code}" if code < 0 else str(code)


def lost(r: dict[str, Any]) -> str:
    if not r["same"]:
        return "see left"
    if "repeated" not in r:
        return "nothing: same metrics and weights"
    again = " and ".join(f"step {step}" for step in r["repeated"])
    return f"{again or 'nothing'} done again; then the same metrics and weights"


def tally(results: list[dict[str, Any]]) -> str:
    tried = [r for r in results if "skipped" not in r]
    failed = [r for r in tried if not r["passed"]]
    text = f"{len(tried)} tried, {len(tried) - len(failed)} as they should be"
    return text + (f", {len(failed)} not (marked below)." if failed else ".")
