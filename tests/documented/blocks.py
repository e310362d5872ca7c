"""The blocks of commands, Python and YAML in the README and in docs/, and how each is tried.

    python tests/documented/blocks.py            # lists them
    python tests/documented/blocks.py --write    # writes how many there are into docs/index.md

What a block is follows from what is in it. A mark before its fence says what does not:

    <!-- test: slow trainer.total_training_steps=2 -->     run by `make test-slow`, with these settings added
    <!-- test: quick trainer.total_training_steps=2 -->    run by `make test`, with these settings added
    <!-- test: tests/cli/test_score.py --pairs -->         run by that test, which has these words

A comment in the block that begins with "needs" or "takes" says to the reader as well why no test runs it.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])
COUNTED = ROOT / "docs/index.md"
WRITTEN = re.compile(r"(<!-- BLOCKS -->\n).*?(<!-- /BLOCKS -->)", re.S)
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>bash|python|yaml)\n(?P<code>.*?)^(?P=indent)```$", re.S | re.M)
MARK = re.compile(r"<!-- test: (.+) -->\s*$")
SAVED = re.compile(r"Save (?:this|it) as\s+`([\w.]+)`[^`]*$")
SETTING = re.compile(r"^'?\+?[a-z_]+(\.[a-z_0-9]+)+=")

STATUSES = {
    "quick": "run by make test",
    "slow": "run by make test-slow",
    "file": "saved, and used by the blocks after it",
    "elsewhere": "run by a test of its own",
    "settings": "settings alone: read as a command reads them",
    "make": "targets of the Makefile, looked up",
    "not run": "says what it needs, or how long it takes; modules and options are looked up",
}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    mark: str
    saved_as: str | None

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def status(self) -> str:
        kind = self.mark.split(" ")[0]
        if kind in ("quick", "slow"):
            return kind
        if kind.startswith("tests/"):
            return "elsewhere"
        if kind:
            raise ValueError(f"{self.name}: <!-- test: {self.mark} --> is none of quick, slow and a test's file")
        if self.saved_as:
            return "file"
        if self.language == "bash":
            if re.search(r"(^|\s)# (needs|takes) ", self.code):
                return "not run"
            if all(SETTING.match(line) for line in self.commands()):
                return "settings"
            if all(line.startswith("make ") for line in self.commands()):
                return "make"
        return "settings" if self.language == "yaml" else "quick"

    def commands(self) -> list[str]:
        """One a line, without comments."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [line for line in (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines) if line]

    def added(self) -> list[str]:
        """The settings of its mark."""
        return self.mark.split(" ")[1:] if self.status in ("quick", "slow") else []


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for fence in FENCE.finditer(text):
        before = text[: fence.start()].rstrip()
        mark = MARK.search(before)
        saved = SAVED.search(before[: mark.start()].rstrip() if mark else before)
        indent = len(fence["indent"])
        yield Block(
            page,
            text.count("\n", 0, fence.start()) + 1,
            fence["language"],
            "".join(line[indent:] or "\n" for line in fence["code"].splitlines(keepends=True)),
            mark[1].strip() if mark else "",
            saved[1] if saved and fence["language"] != "bash" else None,
        )


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def executed(count: Counter[str]) -> int:
    return sum(count[status] for status in ("quick", "slow", "file", "elsewhere"))


def table() -> str:
    """For the page that says how the documentation is tried."""
    count = Counter(block.status for block in all_blocks())
    rows = [f"| {count[status]} | {words} |" for status, words in STATUSES.items()]
    total = f"Of {sum(count.values())} blocks of commands, Python and YAML, {executed(count)} are executed by tests:"
    return "\n".join([f"{total}\n", "| blocks | |", "|---|---|", *rows])


def with_table(text: str) -> str:
    return WRITTEN.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", text)


def summary() -> str:
    count = Counter(block.status for block in all_blocks())
    run = executed(count)
    parts = [f"{count[status]} {status} ({words})" for status, words in STATUSES.items()]
    return f"{sum(count.values())} blocks, {run} of them executed by tests: " + "; ".join(parts)


if __name__ == "__main__":
    if "--write" in sys.argv:
        COUNTED.write_text(with_table(COUNTED.read_text()))
    if "--summary" not in sys.argv:
        for block in all_blocks():
            print(f"{block.status:<10} {block.language:<7} {block.name:<60} {block.mark}")
    print(summary())
