"""The pages of docs/: links lead somewhere, each is in the navigation, and what is generated is up to date."""

import importlib
import re
from pathlib import Path

import documented_metrics
import pytest
import yaml

from verl_omni.config.keys import is_open, known_keys
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


def settings_named(page: Path) -> set[str]:
    """Whole names, and those without the first word that the reader knows by now."""
    text = page.read_text()
    if page.name == "coming_from.md":  # the first column has the names of others
        text = re.sub(r"^\|.*?\|", "|", text, flags=re.MULTILINE)
    roots = r"(?:data|actor_rollout_ref|algorithm|reward|trainer|ray|rollout|actor)"
    found = re.findall(rf"[`\s'+]({roots}(?:\.[a-z_0-9]+)+)(?=[=`\s,;:)])", text)
    return {name for name in found if not re.search(r"\.(pt|py|jsonl?|yaml)$", name)}


# reliability.md shows what is refused
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "reliability.md"], ids=lambda page: page.name)
def test_settings_that_are_named_exist(page):
    for name in settings_named(page):
        whole = {name, f"actor_rollout_ref.{name}"}
        assert whole & known_keys() or any(map(is_open, whole)), f"{page.name} names {name}"


def test_metrics_that_are_named_are_told_somewhere():
    words = {word for path in (ROOT / "verl_omni").rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    words |= {word.replace("beta", "loss") for word in words}  # how AWM calls its distances
    told = [name for name in documented_metrics.names() if "<" not in name and "/" in name]
    assert len(told) > 50 and not [name for name in told if name.rpartition("/")[2] not in words]


def test_corrections_are_on_the_page_of_metrics():
    import torch

    from verl_omni.algorithms.rollout_correction import correct
    from verl_omni.config.algorithm import RolloutCorrectionConfig

    config = RolloutCorrectionConfig(rollout_is="step", rollout_rs="step_k1,seq_mean_k2", rollout_rs_threshold=2.0)
    found = correct(torch.zeros(2, 3), torch.zeros(2, 3), config).metrics
    assert len(found) > 20 and not documented_metrics.unknown(found)


def test_names_of_the_api_can_be_imported():
    tables = re.findall(r"^\| (`verl_omni.*?) \|", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(tables) > 12
    for row in tables:
        first, *others = re.findall(r"`([\w.]+)`", row)
        module, _, name = first.rpartition(".")
        for one in (name, *others):
            assert hasattr(importlib.import_module(module), one), f"{module} has no {one}"
