"""The rewards that rows name in `data_source` and `reward.scorers` adds up: what each needs, and whether it is here."""

import re

from verl_omni.cli.registered import page, parse
from verl_omni.cli.tables import aligned


def rows() -> list[tuple[str, str, str, str]]:
    """(name, what it looks at, ready or what is missing, what it says) of each."""
    from verl_omni.rewards.registry import about, looks_at, missing_package, reads, required_settings, reward_names

    found = []
    for name in reward_names():
        here = "ready"
        if missing := missing_package(name):
            here = f"install {missing}"
        elif settings := required_settings(name):
            here = f"set {', '.join(settings)}"
        elif weights := not_in_cache(name):
            here = f"load {', '.join(weights)}"
        found.append((name, ", ".join((*looks_at(name), *reads(name))), here, about(name)))
    return found


def not_in_cache(name: str) -> list[str]:
    """Repositories of the hub that its settings name by default, as `owner/name`, and that are not on this disk."""
    from pathlib import Path

    from huggingface_hub.constants import HF_HUB_CACHE

    from verl_omni.rewards.registry import default_settings

    values = [value for value in default_settings(name).values() if isinstance(value, str)]
    named = [found[0] for value in values if (found := re.match(r"[\w.-]+/[\w.-]+", value))]
    return [repo for repo in named if not Path(HF_HUB_CACHE, f"models--{repo.replace('/', '--')}").is_dir()]


def main() -> None:
    parse("rewards", __doc__)
    found = rows()
    print(aligned([("name", "looks at", "here", "score"), *found]))
    if any(row[2].startswith("install") for row in found):
        print("\nTo install: pip install 'verl-omni[rewards]'")
    print("\nTo load: weights that the hub has and this disk not; reward.scorers.NAME.model=FOLDER names your own.")
    print("Try one on images that you have: verl-omni score --scorer NAME images/. A function of your own is")
    print("reward.custom_reward_function.path=FILE.py. Settings of each, and what they mean:")
    print(page("rewards"))


if __name__ == "__main__":
    main()
