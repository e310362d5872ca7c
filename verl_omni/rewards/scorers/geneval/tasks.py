"""What a GenEval prompt asks for, as its metadata tells it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_omni.utils.json_files import parse
from verl_omni.utils.suggest import unknown

# In the order of the paper's table.
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")


@dataclass(frozen=True)
class Wanted:
    """So many objects of a class; of a colour; in a relation to those of the requirement number `target`."""

    name: str
    count: int
    colour: str | None = None
    relation: str | None = None
    target: int = 0


@dataclass(frozen=True)
class Task:
    """All of `include` is asked for; none of `exclude`, that is `count` or more of a class, may be there."""

    tag: str
    include: tuple[Wanted, ...]
    exclude: tuple[Wanted, ...] = ()

    def names(self) -> list[str]:
        """Classes to look for."""
        return list(dict.fromkeys(wanted.name for wanted in (*self.include, *self.exclude)))


def read_task(extra_info: Mapping[str, Any] | None, ground_truth: Any) -> Task:
    """The task of a row: its `extra_info` where that has an `include`, else its ground truth, which is then JSON.

    Either is a line of GenEval's evaluation_metadata.jsonl: `{"tag": ..., "include": [{"class": ..., "count": ...,
    "color": ..., "position": [relation, number of the other requirement]}], "exclude": [...]}`. A parquet file cannot
    hold the list `position`, of a text and a number, so there it is JSON. Entries that are null count as absent: that
    is how parquet fills up rows that have none.
    """
    told = extra_info if extra_info and extra_info.get("include") is not None else _parsed(ground_truth)
    tag = told.get("tag")
    if tag not in TAGS:
        raise ValueError(unknown("tag of a GenEval prompt", tag, TAGS))
    include, exclude = ([_wanted(entry) for entry in _list(told.get(key))] for key in ("include", "exclude"))
    if not include:
        raise ValueError(f"the GenEval metadata of a prompt includes nothing: {dict(told)}")
    for number, wanted in enumerate(include):
        if wanted.relation is not None and not 0 <= wanted.target < number:
            raise ValueError(
                f'"{wanted.name}" is to be {wanted.relation} requirement {wanted.target}, which does not come before it'
            )
    return Task(tag, tuple(include), tuple(exclude))


def _parsed(ground_truth: Any) -> dict[str, Any]:
    try:
        told = parse(ground_truth, "it")
    except (TypeError, ValueError, AttributeError):
        told = None
    if not isinstance(told, dict):
        raise ValueError(
            "the geneval reward needs the metadata of a prompt (tag, include, ...) in extra_info, or as JSON in "
            f"reward_model.ground_truth, and that is {ground_truth!r:.100}"
        )
    return told


def _list(value: Any) -> list:
    """Parquet hands lists over as arrays."""
    return [] if value is None else list(value)


def _wanted(entry: Mapping[str, Any]) -> Wanted:
    name, count, colour = entry.get("class"), entry.get("count"), entry.get("color")
    if not name or not count or int(count) != count or count < 1:
        raise ValueError(f'a GenEval requirement needs a "class" and a "count" of 1 or more: {dict(entry)}')
    if colour is not None and colour not in COLOURS:
        raise ValueError(unknown("color of a GenEval requirement", colour, COLOURS))
    relation, target = _list(entry.get("position")) or (None, 0)
    if relation is not None and relation not in RELATIONS:
        raise ValueError(unknown("position of a GenEval requirement", relation, RELATIONS))
    return Wanted(str(name), int(count), colour, relation, int(target))
