"""Recipes: settings that belong together, as YAML files. These come with verl-omni.

    verl-omni recipes                     what there is
    verl-omni recipes show NAME           one of them; into a file, to start one of your own:
    verl-omni recipes show NAME > mine.yaml && verl-omni train mine.yaml

A recipe of your own may also build on a shipped one: `defaults: [NAME, _self_]`.
"""

import argparse
import re
import sys
from pathlib import Path

import verl_omni
from verl_omni.utils.options import Parser
from verl_omni.utils.suggest import unknown

FOLDER = Path(verl_omni.__file__).parent / "recipes"
FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)\}")  # without a default: it has to be set
BASE = re.compile(r"^  - (\w+)$", re.MULTILINE)


def shipped() -> dict[str, Path]:
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """The file of a shipped recipe, by its name, or one of the user's own."""
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise FileNotFoundError(f"there is no recipe {path}; `verl-omni recipes` lists those that are shipped")
        return path
    if name not in shipped():
        own = "one of your own is named as a file, mine.yaml; a setting is key=value"
        raise ValueError(f"{unknown('recipe', name, shipped())}; {own}")
    return shipped()[name]


def summary(path: Path) -> str:
    """What it calls itself."""
    return re.search(r"^recipe: (.*)$", path.read_text(), re.MULTILINE)[1]


def needs(path: Path) -> list[str]:
    """Environment variables that it, or what it builds on, takes something from."""
    text = path.read_text()
    bases = [shipped()[name] for name in BASE.findall(text) if name in shipped() and name != path.stem]
    found = [name for base in bases for name in needs(base)] + FROM_ENVIRONMENT.findall(text)
    return list(dict.fromkeys(found))


def start_with(path: Path, command: str = "train") -> str:
    return " ".join([*(f"{name}=..." for name in needs(path)), f"verl-omni {command}", path.stem])


def main() -> None:
    parser = Parser(
        "verl-omni recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", metavar="list|show")
    actions.add_parser("list", help="one line each (without a word: the same)")
    show = actions.add_parser("show", help="the YAML of one")
    show.add_argument("name", metavar="NAME")
    options = parser.parse_args()
    if options.action == "show":
        try:
            path = find_recipe(options.name)
        except (OSError, ValueError) as error:
            sys.exit(f"error: {error}")
        print(f"{path.read_text()}\n# Start it: {start_with(path)} [key=value ...]")
        print(f"# Whether it fits: {start_with(path, 'plan')} --gpus 8 --memory 80 --gpu h100")
        return
    width = max(map(len, shipped()))
    for name, path in shipped().items():
        print(f"{name:<{width}}  {summary(path)}")
    print("\nMODEL_PATH names the model's folder and DATA_DIR that of the prompts, or your settings do.")
    print("One in full, and how to start it: verl-omni recipes show NAME")


if __name__ == "__main__":
    main()
