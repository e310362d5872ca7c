"""The models that can be trained: pipeline classes, as `_class_name` in a folder's model_index.json has them."""

from verl_omni.cli.registered import parse
from verl_omni.cli.tables import aligned


def rows() -> list[tuple[str, str, str]]:
    """(pipeline class, what it is, what it needs beside prompts) of each."""
    import inspect
    import re

    from verl_omni.pipelines.model_base import DiffusionModelBase

    registry, found = DiffusionModelBase.registry, []
    for architecture in sorted({*registry.builtin, *registry.adapters}):
        adapter = registry.find(architecture, registry.known_algorithms(architecture)[0])
        about = re.split(r"[:\n]", inspect.getmodule(adapter).__doc__ or adapter.__name__)[0].strip()
        found.append((architecture, about, "prompts with images" if adapter.needs_images else "prompts"))
    return found


def main() -> None:
    parse("models", __doc__)
    print(aligned([("pipeline class", "model", "takes"), *rows()]))
    print("\nName a folder in diffusers' layout: actor_rollout_ref.model.path=FOLDER; its class is read from there.")
    print("A miniature of any of them, to try settings on: verl-omni tiny CLASS FOLDER")


if __name__ == "__main__":
    main()
