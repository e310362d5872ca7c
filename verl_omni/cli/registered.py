"""What the three subcommands share that list what is registered: models, algorithms, rewards."""

import sys
from pathlib import Path

import verl_omni
from verl_omni.utils.options import Parser


def page(name: str) -> str:
    """Where to read on: the page in a clone; an installed package has none."""
    found = Path(verl_omni.__file__).parents[1] / "docs" / f"{name}.md"
    return str(found) if found.is_file() else f"docs/{name}.md in the sources of verl-omni"


def parse(name: str, about: str) -> None:
    """The one option that they have: a module that registers things of the user's own."""
    parser = Parser(f"verl-omni {name}", description=about)
    parser.add_argument("--external-lib", metavar="MODULE", help="your modules, or files x.py, that register more")
    options = parser.parse_args()
    from verl_omni.utils.external_lib import import_external_lib

    try:
        import_external_lib(options.external_lib, "--external-lib")
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
