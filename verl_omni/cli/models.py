"""The models that can be trained: pipeline classes, as `_class_name` in a folder's model_index.json has them."""

import inspect
import sys

from verl_omni.cli.registered import parse
from verl_omni.cli.tables import aligned
from verl_omni.pipelines.builtin import Listed, first_words, listed


def rows() -> list[tuple[str, str, str]]:
    """(pipeline class, what it is, what it needs beside prompts) of each."""
    found = sorted([*listed(), *of_your_own()])
    return [(one.architecture, one.about, "prompts with images" if one.needs_images else "prompts") for one in found]


def of_your_own() -> list[Listed]:
    """Those that `--external-lib` has registered."""
    if (base := sys.modules.get("verl_omni.pipelines.model_base")) is None:
        return []
    registry, found = base.DiffusionModelBase.registry, []
    for architecture in registry.adapters.keys() - registry.builtin.keys():
        adapter = registry.find(architecture, registry.known_algorithms(architecture)[0])
        about = inspect.getmodule(adapter).__doc__ or adapter.__name__
        found.append(Listed(architecture, first_words(about), adapter.needs_images))
    return found


def main() -> None:
    parse("models", __doc__)
    print(aligned([("pipeline class", "model", "takes"), *rows()]))
    print("\nName a folder in diffusers' layout: actor_rollout_ref.model.path=FOLDER; its class is read from there.")
    print("A language model: actor_rollout_ref.rewriter.path=FOLDER. GlmImageForConditionalGeneration is a part of a")
    print("GlmImagePipeline. A miniature of any class, to try settings on: verl-omni tiny CLASS FOLDER")


if __name__ == "__main__":
    main()
