"""The algorithms that `actor_rollout_ref.model.algorithm=NAME` selects."""

import re

from verl_omni.cli.recipes import shipped
from verl_omni.cli.registered import page, parse
from verl_omni.cli.tables import aligned


def rows() -> list[tuple[str, str, str, str]]:
    """(name, family, a recipe that trains with it, what it is) of each that is more than a part of another."""
    from verl_omni.algorithms.registry import get_algorithm, whole_algorithms

    recipes = {}
    # every algorithm has one of Qwen-Image; the others are for what a model, a reward or a setting asks for
    for name, path in sorted(shipped().items(), key=lambda recipe: not recipe[0].startswith("qwen_image")):
        for algorithm in re.findall(r"^    algorithm: (\w+)$", path.read_text(), re.MULTILINE):
            recipes.setdefault(algorithm, name)
    found = map(get_algorithm, whole_algorithms())
    return [(a.name, a.trainer_type.replace("_", " "), recipes.get(a.name, "-"), a.description or "-") for a in found]


def main() -> None:
    parse("algorithms", __doc__)
    print(aligned([("name", "family", "a recipe", "what it is"), *rows()]))
    print(f"\nFormulas and settings: {page('algorithms')}")


if __name__ == "__main__":
    main()
