"""Every block of commands in the documentation: run in the order of its page, as a reader would, or looked up."""

import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import warm
import yaml
from blocks import COUNTED, PAGES, ROOT, STATUSES, Block, all_blocks, blocks, with_table
from omegaconf import OmegaConf
from tiny_models import tiny_checkpoint

from verl_omni.config import schema
from verl_omni.config.keys import check_keys, check_keys_of

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

TRAINING = r"^(verl-omni (train|check|overfit|quickstart)|verl-omni [\w.]+=|python -m verl_omni\.(trainer|quickstart))"


def of(*statuses: str) -> list[Block]:
    return [block for block in all_blocks() if block.status in statuses]


def pages(*statuses: str) -> list:
    wanted = {block.page for block in of(*statuses)}
    return [pytest.param(page, id=page.name) for page in PAGES if page in wanted]


class Reader:
    """Somebody in an empty folder, who has what the page `Start here` makes."""

    def __init__(self, folder: Path, page: Path):
        self.folder, self.page = folder, page
        self.home = page.name == "start.md"
        if not self.home:
            shutil.copytree(tiny_checkpoint(), folder / "tiny")
            (folder / "prompts.txt").write_text("a red cube\na red door\na red car\na red balloon\n")
            for block in blocks(ROOT / "docs/start.md"):
                if block.status == "file":
                    self.save(block)

    def save(self, block: Block) -> None:
        (self.folder / block.saved_as).write_text(block.code)

    def do(self, *statuses: str) -> None:
        for block in blocks(self.page):
            if block.status == "file":
                self.save(block)
            elif block.status in statuses:
                self.run(block)

    def run(self, block: Block) -> None:
        if block.language == "python":
            (self.folder / "block.py").write_text(block.code)
        script = "python block.py" if block.language == "python" else "\n".join(with_settings(block))
        python = shlex.join(warm.quick_python())
        names = f'python() {{ {python} "$@"; }}\nverl-omni() {{ {python} -m verl_omni.cli.main "$@"; }}\n'
        bash = ["bash", "-euo", "pipefail", "-c", names + script]
        done = subprocess.run(bash, cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{block.name}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def with_settings(block: Block) -> list[str]:
    """Its commands; those that train have the settings of the mark at their end."""
    more = shlex.join(block.added())
    return [f"{command} {more}" if re.match(TRAINING, command) else command for command in block.commands()]


@pytest.mark.parametrize("page", pages("quick"))
def test_quick_blocks_run(page, tmp_path):
    Reader(tmp_path, page).do("quick")


@pytest.mark.slow
@pytest.mark.parametrize("page", pages("slow"))
def test_all_blocks_of_a_page_run(page, tmp_path):
    Reader(tmp_path, page).do("quick", "slow")


@pytest.mark.parametrize("block", of("settings"), ids=lambda block: block.name)
def test_settings_can_be_read(block):
    if block.language == "yaml":
        recipe = yaml.safe_load(block.code)
        assert recipe.pop("defaults") == ["diffusion_trainer", "_self_"]
        check_keys_of(OmegaConf.create(recipe))
        return
    from hydra.core.override_parser.overrides_parser import OverridesParser

    settings = [word for command in block.commands() for word in shlex.split(command)]
    parsed = OverridesParser.create().parse_overrides(settings)
    known = OmegaConf.structured(schema.DiffusionTrainerConfig)
    check_keys(override.key_or_group for override in parsed)
    for override in parsed:  # of a type that the setting has
        OmegaConf.update(known, override.key_or_group, override.value(), force_add=True)


@pytest.mark.parametrize("block", of("elsewhere"), ids=lambda block: block.name)
def test_the_test_that_a_mark_names_is_there(block):
    file, _, words = block.mark.partition(" ")
    assert words and words in (ROOT / file).read_text()


@pytest.mark.parametrize("block", of("make"), ids=lambda block: block.name)
def test_targets_are_in_the_makefile(block):
    makefile = (ROOT / "Makefile").read_text()
    for command in block.commands():
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE), command


@pytest.mark.parametrize("block", of("not run"), ids=lambda block: block.name)
def test_what_is_not_run_is_looked_up(block):
    """The program is there and knows the options. What it needs stands where the reader sees it."""
    for command in block.commands():
        words = shlex.split(command)
        if words[0] == "python":
            source = (module_file(words[2]) if words[1] == "-m" else ROOT / words[1]).read_text()
            shared = re.findall(r"^from (benchmarks\.\w+) import", source, re.MULTILINE)
            source = "\n".join([source, *(module_file(name).read_text() for name in shared)])
        elif words[0] == "verl-omni":
            source = "\n".join(path.read_text() for path in (ROOT / "verl_omni/cli").glob("*.py"))
        else:
            continue
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in source, f"{block.name}: {words[:3]} has no {option}"


def module_file(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    return Path((importlib.util.find_spec(f"{name}.__main__") if spec.submodule_search_locations else spec).origin)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_says_what_is_in_it(page):
    """One without a language would be tried by nobody; `text` is no command."""
    opened = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)[::2]
    assert set(opened) <= {"bash", "python", "yaml", "text"}


def test_the_count_of_executed_blocks_is_the_written_one():
    text = COUNTED.read_text()
    assert "<!-- BLOCKS -->" in text and with_table(text) == text, "run: python tests/documented/blocks.py --write"


def test_every_block_has_a_status():
    assert {block.status for block in all_blocks()} <= STATUSES.keys()
