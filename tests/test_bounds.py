"""The bounds of pyproject.toml are what `make test-oldest` and `make test-newest` install."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib  # Python 3.10, where pytest brings it

ROOT = Path(__file__).parent.parent


def declared() -> list[Requirement]:
    """What the project itself asks for, without vllm, which is in an environment of its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = project["dependencies"] + extras["rewards"] + extras["video"] + extras["dev"]
    return [Requirement(r) for r in named if not r.startswith("verl-omni[")]


def pins(name: str) -> dict[str, Version]:
    lines = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(), re.MULTILINE)
    return {package.lower().replace("_", "-"): Version(version) for package, version in lines}


def outside(name: str) -> set[str]:
    """The packages whose pinned version pyproject.toml does not allow."""
    pinned = pins(name) | {"torch": Version(re.search(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)[1])}
    return {r.name for r in declared() if not r.specifier.contains(pinned[r.name.lower()], prereleases=True)}


def test_the_oldest_are_the_lower_bounds():
    oldest = pins("constraints-oldest.txt")
    bounds = {r.name: [Version(s.version) for s in r.specifier if s.operator in (">=", "==")] for r in declared()}
    bounds.pop("torch")  # the Makefile's TORCH: the only build for a CPU that the tests can count on
    assert {name: [oldest[name.lower()]] for name in bounds} == bounds


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_what_is_tested_is_allowed(name):
    assert not outside(name)


def test_nothing_but_verl_holds_back_from_the_newest():
    assert outside("constraints-newest.txt") == {"transformers"}
