"""No number is so large that it fits into no machine: every count has an upper bound, in its declaration."""

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from verl_omni.config.knob import Range, check_ranges, walk
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.rewards import registry


def declared(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, type) of every knob."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default
        if dataclasses.is_dataclass(default):
            yield from declared(type(default), f"{prefix}{field.name}.")
        elif "moved" not in field.metadata:
            yield f"{prefix}{field.name}", hints[field.name]


def kinds(annotation: Any) -> set[type]:
    if not get_args(annotation):
        return {annotation} if isinstance(annotation, type) else set()
    return set().union(*map(kinds, get_args(annotation)))


def settings_of(reward: Any) -> dict[str, Any]:
    takes = reward.__init__ if inspect.isclass(reward) else reward
    hints = typing.get_type_hints(takes, include_extras=True)
    return {n: hints[n] for n, p in inspect.signature(takes).parameters.items() if p.kind is p.KEYWORD_ONLY}


def is_open(range_: Range) -> bool:
    return range_.most is None and range_.below is None


TYPES = dict(declared(DiffusionTrainerConfig))
TIMES = ("timeout", "minutes", "_ms")


def test_every_count_and_every_time_has_an_upper_bound():
    assert TYPES.keys() == {knob.name for knob in walk(DiffusionTrainerConfig)}
    counts = [
        knob
        for knob in walk(DiffusionTrainerConfig)
        if int in kinds(TYPES[knob.name]) or float in kinds(TYPES[knob.name]) and knob.name.endswith(TIMES)
    ]
    assert len(counts) > 60
    assert [knob.name for knob in counts if is_open(knob.range)] == []


def test_and_so_have_those_of_the_rewards():
    counts = [
        (f"{name}.{setting}", annotation)
        for name in registry.reward_names()
        for setting, annotation in settings_of(registry.get_reward_fn(name)).items()
        if int in kinds(annotation)
    ]
    assert len(counts) > 10
    for setting, annotation in counts:
        with pytest.raises(ValueError, match=f"{setting}=1000000000000: expected .* at most"):
            registry._check_value(setting, 10**12, annotation)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda c: setattr(c.actor_rollout_ref.rollout, "n", 10**9),
            "rollout.n=1000000000: expected 1 or more, at most",
        ),
        (lambda c: setattr(c.trainer, "total_training_steps", 10**20), "expected 1 or more, at most 1000000000"),
        (lambda c: setattr(c.reward, "timeout", 1e300), r"reward.timeout=1e\+300: expected above 0, at most"),
    ],
)
def test_what_is_beyond_it_is_refused(change, line):
    config = DiffusionTrainerConfig()
    check_ranges(config)
    change(config)
    with pytest.raises(ValueError, match=line):
        check_ranges(config)
