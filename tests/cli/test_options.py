"""Options of all subcommands: a number that cannot be and a name that is misspelt are one line."""

import importlib
import sys

import pytest

from verl_omni.cli.main import SUBCOMMANDS, main
from verl_omni.cli.train import check_options
from verl_omni.utils.options import Parser

PARSERS = [name for name in SUBCOMMANDS if name not in ("train", "check")]  # whose options are Hydra's


def said(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["verl-omni", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    if isinstance(ended.value.code, str):
        return ended.value.code
    assert ended.value.code == 2
    return capsys.readouterr().err.rstrip("\n")


class Read(Exception):
    pass


@pytest.mark.parametrize("name", PARSERS)
def test_a_number_has_bounds(monkeypatch, name):
    """0 images at once, -1 steps, nan seconds."""

    def read(parser, *_):
        found.extend(parser._actions)
        raise Read

    found: list = []
    monkeypatch.setattr(Parser, "parse_args", read)
    monkeypatch.setattr(Parser, "parse_known_args", read)
    monkeypatch.setattr(sys, "argv", [f"verl-omni {name}"])
    module = importlib.import_module(SUBCOMMANDS[name].module)
    with pytest.raises(Read):
        module.main()
    assert found and not [action.option_strings for action in found if action.type in (int, float)]


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["sample", "run", "--batch-size", "0"], "argument --batch-size: 0: expected a whole number, 1 or more"),
        (["sample", "run", "--limit", "0"], "argument --limit: 0: expected a whole number, 1 or more"),
        (["eval", "run", "--seeds", "-1"], "expected a whole number, 0 or more"),
        (["score", "x.png", "--batch-size", "-1"], "argument --batch-size: -1: expected a whole number, 1 or more"),
        (["overfit", "--steps", "0"], "argument --steps: 0: expected a whole number, 1 or more"),
        (["overfit", "--target", "nan"], "argument --target: nan: expected a number"),
        (["plan", "--memory", "0"], "argument --memory: 0: expected a number above 0"),
        (["watch", ".", "--port", "65536"], "argument --port: 65536: expected a whole number, 0 to 65535"),
        (["serve-reward", "ocr", "--port", "99999"], "argument --port: 99999: expected a whole number, 0 to 65535"),
        (["prepare-pairs", "m", "d", "o", "--height", "0", "--width", "8"], "argument --height: 0: expected a whole"),
        (["sample", "run", "--sedes", "1"], 'there is no option --sedes. Did you mean "--seeds"?'),
        (["overfit", "--stesp", "3"], 'there is no option --stesp. Did you mean "--steps"?'),
        (["plan", "--memroy=3"], 'there is no option --memroy. Did you mean "--memory"?'),
        (["recipes", "lst"], "invalid choice: 'lst' (choose from 'list', 'show') Did you mean \"list\"?"),
        (["doctor", "now"], "now: nothing is expected here"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, arguments, line):
    told = said(monkeypatch, capsys, *arguments).splitlines()[-1]
    assert told.startswith("error: ") and line in told


def test_what_hydra_knows_goes_on_to_it():
    check_options(["--cfg", "job", "-p", "trainer", "trainer.seed=7"])


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["--hlep"], 'there is no option --hlep. Did you mean "--help"?'),
        (["trainer.seed=1", "--cgf", "job"], 'there is no option --cgf. Did you mean "--cfg"?'),
    ],
)
def test_a_mistake_in_an_option_of_train_is_one_line(arguments, line):
    """Not by `main`: it watches the run from here, and goes on in a fork."""
    with pytest.raises(SystemExit) as ended:
        check_options(arguments)
    assert line in ended.value.code and "\n" not in ended.value.code
