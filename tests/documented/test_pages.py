"""The pages of docs/: links lead somewhere, each is in the navigation, and what is generated is up to date."""

import re
from pathlib import Path

import pytest
import yaml

from verl_omni.report.document_tables import fill, knobs_table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("**/*.md")])


def prose(page: Path) -> str:
    """Without code, in which brackets and # mean something else."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]+`", lambda code: re.sub(r"[\[\]()#]", "", code[0]), text)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and MkDocs name them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower().strip())) for heading in headings}


def targets(navigation: list | dict | str) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [found for part in parts for found in targets(part)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        if page.is_relative_to(DOCS):
            assert target.is_relative_to(DOCS), f"{page.name} links to {link}, which the site does not have"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}; {target.name} has no such heading"


def test_every_page_is_in_the_navigation_once():
    named = targets(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS))


def test_the_table_of_settings_is_what_the_dataclasses_declare():
    text = (DOCS / "configuration.md").read_text()
    fresh = fill(text, "KNOBS", knobs_table())
    assert fresh == text, "run: python -m verl_omni.report.document_tables docs/configuration.md"
