"""The rules of GenEval (arXiv 2310.11513): from objects that were seen, and their colours, to right or wrong.

No model is needed here. The numbers are those of the paper's repository, github.com/djghosh13/geneval.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from verl_omni.rewards.scorers.geneval.tasks import Task, Wanted

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

# Centres count as apart along an axis by what they are more apart than this share of the two sizes together.
POSITION_MARGIN = 0.1


@dataclass(frozen=True)
class Seen:
    """An object that a detector reports."""

    name: str
    score: float
    box: Box


@dataclass(frozen=True)
class Limits:
    """Which reports count. The defaults are the paper's, for Mask2Former."""

    threshold: float = 0.3
    counting_threshold: float = 0.9
    max_objects: int = 16
    max_overlap: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """Right or wrong, why it is wrong (else empty), and how much of it is right by the graded score."""

    correct: bool
    reason: str
    graded: float


Objects = Mapping[str, list[Seen]]
Colours = Mapping[str, list[str]]


def keep(seen: Iterable[Seen], tag: str, limits: Limits) -> dict[str, list[Seen]]:
    """By class, the surest first: above the threshold, at most `max_objects`, none over another that is surer.

    Two boxes are over each other where their intersection is `max_overlap` of their union, or more; a `max_overlap`
    of 1 lets all pass.
    """
    threshold = limits.counting_threshold if tag == "counting" else limits.threshold
    by_name: dict[str, list[Seen]] = {}
    for one in sorted(seen, key=lambda one: -one.score):
        if one.score > threshold:
            by_name.setdefault(one.name, []).append(one)
    for name, found in by_name.items():
        kept: list[Seen] = []
        for one in found[: limits.max_objects]:
            if limits.max_overlap == 1 or all(overlap(one.box, other.box) < limits.max_overlap for other in kept):
                kept.append(one)
        by_name[name] = kept
    return by_name


def overlap(a: Box, b: Box) -> float:
    """Intersection over union of two boxes whose last pixels belong to them."""
    shared = (max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    return _area(shared) / (_area(a) + _area(b) - _area(shared))


def _area(box: Box) -> float:
    return max(box[2] - box[0] + 1, 0) * max(box[3] - box[1] + 1, 0)


def relations(a: Box, b: Box) -> set[str]:
    """Where `a` is, seen from `b`: none, one, or two of them (left of and above).

    The offset of the centres, less the margin along each axis, counts as a direction where it is more than half of the
    whole offset.
    """
    offset = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    margin = [POSITION_MARGIN * (abs(a[i + 2] - a[i]) + abs(b[i + 2] - b[i])) for i in (0, 1)]
    apart = [math.copysign(max(abs(o) - m, 0), o) for o, m in zip(offset, margin, strict=True)]
    if all(abs(value) < 1e-3 for value in apart):
        return set()
    dx, dy = (value / math.hypot(*offset) for value in apart)
    found = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {name for name, holds in found.items() if holds}


def judge(task: Task, objects: Objects, colours: Colours) -> Verdict:
    """Whether the objects are what the task asks for.

    `colours` are, by class, those of its objects in their order, as far as the task asks for them. Colours and
    positions are looked at for the surest objects, as many as are asked for.
    """
    wrong: list[str] = []
    groups: list[list[Seen] | None] = []  # of each requirement, the objects that fulfil it
    for wanted in task.include:
        found = objects.get(wanted.name, [])[: wanted.count]
        reason = _lack(wanted, found, groups, colours)
        wrong += [reason] if reason else []
        groups.append(None if reason else found)
    for unwanted in task.exclude:
        count = len(objects.get(unwanted.name, []))
        if count >= unwanted.count:
            wrong.append(f"expected {unwanted.name}<{unwanted.count}, found {count}")
    return Verdict(not wrong, "; ".join(wrong), graded(task, objects, colours))


def _lack(wanted: Wanted, found: list[Seen], groups: list[list[Seen] | None], colours: Colours) -> str:
    """What a requirement lacks, in words; nothing where it is fulfilled."""
    if len(found) < wanted.count:
        return f"expected {wanted.name}>={wanted.count}, found {len(found)}"
    if wanted.colour is not None:
        seen = colours[wanted.name][: wanted.count]
        if seen.count(wanted.colour) < wanted.count:
            return f"expected {wanted.colour} {wanted.name}>={wanted.count}, found {' and '.join(seen)}"
    if wanted.relation is not None:
        targets = groups[wanted.target]
        if targets is None:
            return f"no target for {wanted.name} to be {wanted.relation}"
        for target in targets:
            for one in found:
                holds = relations(one.box, target.box)
                if wanted.relation not in holds:
                    where = " and ".join(sorted(holds)) or "in no clear direction from"
                    return f"expected {wanted.name} {wanted.relation} {target.name}, found it {where}"
    return ""


def graded(task: Task, objects: Objects, colours: Colours) -> float:
    """The mean over all that is asked for, as Flow-GRPO (arXiv 2505.05470) trains with.

    A number of objects counts 1 - |found - wanted| / wanted, which is below 0 for more than twice as many. A colour
    counts the same of the objects that have it, a position 1 or 0, and both count 0 where the number is not right.
    (Flow-GRPO's published server counts a wrong position as 0 and 1, which makes 3/4 of a prompt where this is 2/3.)
    """
    parts: list[float] = []
    groups: list[list[Seen] | None] = []
    for wanted in task.include:
        found = objects.get(wanted.name, [])
        fulfilled = len(found) == wanted.count
        parts.append(_closeness(len(found), wanted.count))
        if wanted.colour is not None:
            right = colours[wanted.name][: wanted.count].count(wanted.colour) if fulfilled else 0
            parts.append(_closeness(right, wanted.count))
            fulfilled = right == wanted.count
        if wanted.relation is not None:
            targets = groups[wanted.target]
            fulfilled = fulfilled and targets is not None
            fulfilled = fulfilled and all(wanted.relation in relations(a.box, b.box) for a in found for b in targets)
            parts.append(float(fulfilled))
        groups.append(found if fulfilled else None)
    return sum(parts) / len(parts)


def _closeness(found: int, wanted: int) -> float:
    return 1 - abs(found - wanted) / wanted
