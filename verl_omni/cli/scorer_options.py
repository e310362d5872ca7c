"""What `score` and `eval` both are told: which rewards, with which settings."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_omni.rewards.by_hand import Rewards

NONE = "say which reward: --scorer NAME (`verl-omni rewards` lists them), --scorers YAML, or --function FILE.py:NAME"


def add_scorers(parser: argparse.ArgumentParser, setting: str) -> None:
    add = parser.add_argument
    add("--scorer", action="append", default=[], metavar="NAME", help="a registered reward; may be given several times")
    several = "as reward.scorers of a run: '[{name: ocr, weight: 1}, ...]', gates too; `score` is then their sum"
    add("--scorers", metavar="YAML", help=several)
    add("--function", metavar="FILE.py:NAME", help="a function of your own")
    add(setting, dest="scorer_set", action="append", default=[], metavar="SCORER.SETTING=VALUE", help="its settings")


def read_rewards(options: argparse.Namespace, setting: str) -> "Rewards":
    """Checked as a run checks them."""
    import yaml

    from verl_omni.rewards import check_package, check_settings
    from verl_omni.rewards.by_hand import Rewards
    from verl_omni.rewards.choice import OWN, read_choices
    from verl_omni.rewards.reward_function import RewardFunction

    if options.scorers and options.scorer:
        raise ValueError("--scorer and --scorers: give one of the two")
    entries: Any = yaml.safe_load(options.scorers) if options.scorers else {n: {"weight": 1.0} for n in options.scorer}
    for given in options.scorer_set:
        key, equals, value = given.partition("=")
        label, dot, name = key.partition(".")
        if not equals or not dot:
            raise ValueError(f"{setting} {given}: expected SCORER.SETTING=VALUE, such as {setting} ocr.num_threads=2")
        if label not in options.scorer:
            raise ValueError(f"{setting} {given}: there is no --scorer {label}")
        entries[label][name] = yaml.safe_load(value)
    choices = read_choices(entries)
    for label, choice in choices.items():
        if choice.name == OWN:
            raise ValueError(f"--scorers, {label}: give a function of your own with --function")
        if choice.processes:
            raise ValueError(f"{label}.processes={choice.processes}: this command scores in its own process")
        check_settings(choice.name, choice.settings, choice.label)
        check_package(choice.name)
    own = {}
    if options.function:
        path, colon, name = options.function.rpartition(":")
        if not colon:
            path, name = options.function, "compute_score"
        own = {name: RewardFunction.load(path, name)}
    if not choices and not own:
        raise ValueError(NONE)
    return Rewards(choices, own, added_up=bool(options.scorers))
