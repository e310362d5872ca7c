"""The bounds of pyproject.toml are what `make test-oldest` and `make test-newest` install."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from verl_omni.pipelines.vllm_omni import INSTALL

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


def test_vllm_omni_of_a_wheel_is_that_of_the_makefile():
    page, makefile = (ROOT / "docs/vllm_omni.md").read_text(), (ROOT / "Makefile").read_text()
    lines = [re.search(r"VLLM_TARGET_DEVICE=empty .*(\n.*)?", text)[0] for text in (page, makefile, INSTALL)]
    typed, made, said = (re.findall(r"[\w-]+==[\w.]+|--no-[\w-]+|VERSION_OVERRIDE=\S+", line) for line in lines)
    assert typed == made == said and len(typed) == 8


def test_what_vllm_omni_has_on_a_cpu_is_pinned():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = pins("constraints.txt") | {"setuptools": Version("80.10.2")}  # by the extra alone: .venv has a later one
    for requirement in map(Requirement, extras["vllm-omni-cpu"]):
        assert requirement.specifier.contains(pinned[requirement.name]), requirement


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_the_version_of_an_image_is_one(name):
    """What its first lines give to setuptools-scm, with some commit in the place of git's answer."""
    given = re.search(r"--build-arg VERSION=(.+) -t ", (ROOT / "docker" / name).read_text())[1]
    assert Version(re.sub(r"\$\(.+\)", "f1c47c7", given)) > Version("0")
