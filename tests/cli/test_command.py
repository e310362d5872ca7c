"""`verl-omni`: its help pages, names that are not known, a reader that leaves, recipes, completion."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from verl_omni.cli import completion, main, recipes, train
from verl_omni.cli.train_help import FIRST, SECTIONS, help_text, walk
from verl_omni.config.schema import DiffusionTrainerConfig

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "verl", "hydra", "diffusers", "transformers", "pyarrow", "pandas")
KNOBS = [knob.name for knob in walk(DiffusionTrainerConfig)]
HELP_OF_ALL = f"""
import contextlib, io, json, sys
from verl_omni.cli import main
pages = {{}}
for name in ["", *main.SUBCOMMANDS]:
    page = io.StringIO()
    sys.argv = ["verl-omni", *name.split(), "--help"]
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        main.main()
    pages[name] = page.getvalue()
print(json.dumps([pages, [m for m in {HEAVY} if m in sys.modules]]))
"""


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "verl_omni.cli.main", *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def pages() -> tuple[dict[str, str], list[str]]:
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_page_lists_every_subcommand(pages):
    for name, subcommand in main.SUBCOMMANDS.items():
        assert f"  {name:<16} {subcommand.summary}\n" in pages[0][""]


@pytest.mark.parametrize("name", [name for name in main.SUBCOMMANDS if name != "train"])
def test_a_subcommands_page_says_how_it_is_typed(pages, name):
    assert pages[0][name].startswith(f"usage: verl-omni {name} ")


def test_no_help_page_loads_what_takes_long_to_load(pages):
    assert pages[1] == []


def said(monkeypatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["verl-omni", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code


def test_a_mistyped_subcommand_names_its_neighbour(monkeypatch):
    unknown, lists = "error: unknown subcommand", "verl-omni --help lists them"
    assert said(monkeypatch, "quikstart") == f'{unknown} "quikstart": did you mean "quickstart"? {lists}'
    assert said(monkeypatch, "xyzzy") == f'{unknown} "xyzzy"; {lists}'
    assert '"qwen_image_ocr" is a recipe: type verl-omni train qwen_image_ocr' in said(monkeypatch, "qwen_image_ocr")


@pytest.mark.parametrize("first", ["trainer.save_freq=1", "--cfg", "+x=1", "mine.yaml"])
def test_settings_alone_train(monkeypatch, first):
    ran = []
    monkeypatch.setattr(train, "command", lambda: ran.append(list(sys.argv)))
    monkeypatch.setattr(sys, "argv", ["verl-omni", first])
    main.main()
    assert ran == [["verl-omni train", first]]


@pytest.mark.parametrize("module", ["verl_omni.cli.main train", "verl_omni.trainer.main_diffusion"])
def test_a_reader_that_leaves_is_no_error(module):
    """As `| head -1` does, here before there is anything to read."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", *module.split(), "--help", "all"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


# Settings: ten, a section, all.


def test_ten_settings_come_first():
    page = help_text()
    assert len(FIRST) == 10 and all(f"  {name}=" in page for name in FIRST)
    assert page.count("\n      ") == 10 and f"All {len(KNOBS)}, by section" in page


def test_all_are_in_a_section():
    text = help_text("all")
    assert [line[2:].split("=")[0] for line in text.split("\n") if line[:2] == "  " and line[2] != " "] == sorted(
        KNOBS, key=lambda name: next(i for i, s in enumerate(SECTIONS) if f"{name}.".startswith(f"{s}."))
    )


def test_a_section_and_one_setting_and_none_of_either():
    page = help_text("actor_rollout_ref.rollout.pipeline")
    assert "rollout.pipeline.height=" in page and "rollout.algo" not in page
    assert help_text("data.seed").startswith("  data.seed=0\n      seed of the shuffling")
    with pytest.raises(ValueError, match='"rewrad": did you mean "reward"'):
        help_text("rewrad")


# Recipes.


@pytest.mark.parametrize("name", recipes.shipped())
def test_a_recipe_says_what_it_is_and_what_it_takes(name, monkeypatch, capsys):
    path = recipes.shipped()[name]
    assert yaml.safe_load(path.read_text())["recipe"] == recipes.summary(path)
    assert "MODEL_PATH" in recipes.needs(path)
    monkeypatch.setattr(sys, "argv", ["verl-omni recipes", "show", name])
    recipes.main()
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown) == yaml.safe_load(path.read_text()), "what is shown is a recipe itself"
    assert f"verl-omni train {name} [key=value ...]" in shown


def test_what_a_recipe_builds_on_takes_things_too():
    path = recipes.shipped()["qwen_image_multi_reward_lora"]
    assert recipes.needs(path) == ["DATA_DIR", "MODEL_PATH", "REWARD_ADDRESS"]


def test_a_shipped_recipe_one_of_your_own_and_one_that_builds_on_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL_PATH", "/models/x")
    monkeypatch.setenv("DATA_DIR", "/data")
    (tmp_path / "mine.yaml").write_text("defaults: [qwen_image_ocr_lora, _self_]\ntrainer: {save_freq: 7}\n")
    done = command("train", str(tmp_path / "mine.yaml"), "--cfg", "job", "trainer.test_freq=5")
    config = yaml.safe_load(done.stdout)
    assert (config["trainer"]["save_freq"], config["trainer"]["test_freq"]) == (7, 5), done.stderr
    assert config["actor_rollout_ref"]["model"]["lora_rank"] == 32
    assert train.with_recipe(["qwen_image_ocr", "a=1"]) == [
        "--config-dir", str(recipes.FOLDER), "--config-name", "qwen_image_ocr", "a=1"
    ]  # fmt: skip
    assert train.with_recipe(["a=1", "b=2"]) == ["a=1", "b=2"]


@pytest.mark.parametrize(
    "name, line",
    [
        ("qwen_image_orc", 'unknown recipe "qwen_image_orc": did you mean "qwen_image_ocr"'),
        ("nowhere/mine.yaml", "there is no recipe nowhere/mine.yaml"),
        ("trainer.save_freq", "a setting is key=value"),
    ],
)
def test_no_recipe(name, line):
    with pytest.raises(SystemExit) as ended:
        train.as_hydra_reads_them([name])
    assert line in ended.value.code and ended.value.code.startswith("error: ")


def test_a_variable_that_a_recipe_takes_and_nobody_has_set(monkeypatch):
    for name in ("MODEL_PATH", "DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    done = command("train", "qwen_image_ocr", "data.train_files=x.parquet")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        "error: actor_rollout_ref.model.path comes from the environment variable MODEL_PATH, which is not set: set it, "
        "or type actor_rollout_ref.model.path=..."
    )


# Completion, asked for as each shell does.

ASKS = {
    "bash": 'compopt() {{ :; }}; eval "$(verl-omni completion bash)"; COMP_LINE="{typed}"; COMP_POINT=${{#COMP_LINE}}; '
    '_verl_omni; printf "%s\\n" "${{COMPREPLY[@]}}"',
    "zsh": 'compdef() {{ :; }}; compadd() {{ print -rl -- "${{(@)@[$@[(i)--]+1,-1]}}"; }}; _files() {{ :; }}; '
    'eval "$(verl-omni completion zsh)"; words=({typed}); CURRENT=${{#words}}; _verl_omni',
    "fish": 'verl-omni completion fish | source; complete -C "{typed}"',
}


@pytest.mark.parametrize("shell", ASKS)
def test_a_shell_completes(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    cases = {
        "verl-omni comp": ["completion"],
        "verl-omni train qwen_image_ocr_lora_da": ["qwen_image_ocr_lora_dancegrpo"],
        "verl-omni train data.train_": ["data.train_files=", "data.train_batch_size="],
        "verl-omni train trainer.device=": ["trainer.device=cpu", "trainer.device=cuda"],
        "verl-omni trainer.val_o": ["trainer.val_only="],
        "verl-omni recipes s": ["show"],
        "verl-omni plan --d": ["--devices"],
    }
    (tmp_path / "verl-omni").write_text(f'#!/bin/sh\nexec {sys.executable} -m verl_omni.cli.main "$@"\n')
    (tmp_path / "verl-omni").chmod(0o755)
    told = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    script = "; echo ---; ".join(ASKS[shell].format(typed=typed) for typed in cases)
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, cwd=ROOT, env=os.environ | told)
    for words, found in zip(done.stdout.split("---\n"), cases.values(), strict=True):
        expected = [word.split("=")[1] or word for word in found] if shell == "bash" and "=c" in found[0] else found
        assert sorted(words.split()) == sorted(expected), done.stderr


def test_words_of_a_subcommand_that_is_not_typed_yet():
    assert {"--help", "train"} <= set(completion.candidates([""]))
