"""The tables of the README, generated from what is registered.

    python -m verl_omni.utils.readme_tables README.md     # writes them in
"""

import importlib
import inspect
import re
import sys
from pathlib import Path


def models_table() -> str:
    """One row a built-in architecture, with the first words of its adapter's description."""
    from verl_omni.pipelines.model_base import _BUILTIN, DiffusionModelBase

    rows = ["| pipeline class | model | adapter |", "|---|---|---|"]
    for architecture, package in sorted(_BUILTIN.items()):
        importlib.import_module(package)
        adapter = DiffusionModelBase.registry.find(architecture, "flow_grpo")
        module = inspect.getmodule(adapter)
        model = re.split(r"[:\n]", module.__doc__)[0].strip()
        path = module.__name__.replace(".", "/") + ".py"
        rows.append(f"| `{architecture}` | {model} | [{package.split('.')[-1]}]({path}) |")
    return "\n".join(rows)


def fill(text: str, name: str, table: str) -> str:
    """The text with ``table`` between its marks ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the text has no <!-- {name} --> ... <!-- /{name} --> to fill")
    return pattern.sub(lambda m: m[1] + table + "\n" + m[2], text)


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(fill(readme.read_text(), "MODELS", models_table()))
