"""Which rewards a row has, by `reward.scorers` and its `data_source`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_omni.config.knob import MOST_PROCESSES
from verl_omni.utils.suggest import unknown

OWN = "custom_reward_function"  # the user's function as one reward of several
SHAPE = "expected a list of rewards, such as [{name: ocr, weight: 1}], or their settings by name"


@dataclass(frozen=True)
class Gate:
    """A reward counts only where the score of another, `by`, is `at_least` so high; `otherwise` it is this number."""

    by: str
    at_least: float
    otherwise: float = 0.0


@dataclass(frozen=True)
class Choice:
    """One entry of `reward.scorers`. Its keys are these fields; all others are settings of the reward.

    One without a weight only holds the settings of the reward that a row's data_source names.
    """

    label: str
    name: str
    weight: float | None = None
    data_sources: tuple[str, ...] | None = None  # rows that it is for; None: all
    gate: Gate | None = None
    processes: int = 0  # of its own; 0: in the process that asks
    gpus: float = 0.0  # of each of those
    settings: Mapping[str, Any] = field(default_factory=dict)

    def is_for(self, data_source: str) -> bool:
        return self.data_sources is None or data_source in self.data_sources


def read_choices(scorers: Any) -> dict[str, Choice]:
    """Label -> choice, from a list of `{name, weight, ...}` or a dict by name. Raises in the user's words."""
    if not scorers:
        return {}
    if isinstance(scorers, Mapping):
        entries = [({"name": name, "label": name}, name, entry) for name, entry in scorers.items()]
    elif isinstance(scorers, Sequence) and not isinstance(scorers, str):
        entries = [({"weight": 1.0}, f"[{i}]", entry) for i, entry in enumerate(scorers)]
    else:
        raise ValueError(f"reward.scorers={scorers!r}: {SHAPE}")
    choices: dict[str, Choice] = {}
    for defaults, where, entry in entries:
        if isinstance(entry, str):
            entry = {"name": entry}
        if not isinstance(entry, Mapping) or not isinstance((defaults | dict(entry)).get("name"), str):
            raise ValueError(f"reward.scorers, {where}={entry!r}: {SHAPE}")
        choice = _read(defaults | dict(entry))
        if choice.label in choices:
            raise ValueError(
                f'reward.scorers has "{choice.label}" twice: give one of them another `label`, such as '
                f"{{name: {choice.name}, label: {choice.label}_2}}"
            )
        choices[choice.label] = choice
    _check_gates(choices)
    return choices


def _read(entry: dict[str, Any]) -> Choice:
    name = entry.pop("name")
    label = entry.pop("label", name)
    where = f"reward.scorers.{label}"
    if label == "score":
        raise ValueError('reward.scorers: the label "score" is that of the sum; choose another')
    weight = entry.pop("weight", None)
    if weight is not None and (not _is_number(weight) or weight == 0):
        raise ValueError(f"{where}.weight={weight!r}: expected a number other than 0 (below 0: the less, the better)")
    sources = entry.pop("data_sources", None)
    if sources is not None:
        sources = (sources,) if isinstance(sources, str) else tuple(sources)
        if weight is None:
            raise ValueError(f"{where}.data_sources has no effect without {where}.weight")
    gate = entry.pop("gate", None)
    if gate is not None:
        numbers = [gate.get("at_least"), gate.get("else", 0.0)] if isinstance(gate, Mapping) else [None]
        known = isinstance(gate, Mapping) and {"by", "at_least"} <= set(gate) <= {"by", "at_least", "else"}
        if not known or not all(map(_is_number, numbers)):
            raise ValueError(
                f"{where}.gate={gate!r}: expected {{by: <another reward>, at_least: <its least score>}}, and, for a "
                "reward below 0, else: <what it is where the gate is closed>"
            )
        gate = Gate(gate["by"], *map(float, numbers))
    processes, gpus = entry.pop("processes", 0), entry.pop("gpus", 0)
    if type(processes) is not int or not 0 <= processes <= MOST_PROCESSES:
        expected = f"expected a whole number, 0 or more, at most {MOST_PROCESSES}"
        raise ValueError(f"{where}.processes={processes!r}: {expected}")
    if not _is_number(gpus) or gpus < 0:
        raise ValueError(f"{where}.gpus={gpus!r}: expected a number, 0 or more")
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"{where}.gpus={gpus}: expected a part of one GPU, such as 0.5, or a whole number of them")
    if gpus and not processes:
        raise ValueError(f"{where}.gpus={gpus} has no effect without {where}.processes=1 or more")
    weight = None if weight is None else float(weight)
    return Choice(label, name, weight, sources, gate, processes, float(gpus), entry)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_gates(choices: Mapping[str, Choice]) -> None:
    for choice in choices.values():
        if choice.gate is None:
            continue
        where = f"reward.scorers.{choice.label}.gate"
        if choice.weight is None:
            raise ValueError(f"{where} has no effect without reward.scorers.{choice.label}.weight")
        others = [c.label for c in choices.values() if c.weight is not None and c is not choice]
        if choice.gate.by not in others:
            raise ValueError(unknown(f"{where}.by", choice.gate.by, others))
        by = choices[choice.gate.by]
        if by.data_sources is not None and not set(choice.data_sources or ("*",)) <= set(by.data_sources):
            raise ValueError(f"{where}.by={by.label}, which has other data_sources: give both the same")


def weighted(choices: Mapping[str, Choice]) -> dict[str, float]:
    """Label -> weight of the rewards that are added up; empty where each row has the one of its data_source."""
    return {label: choice.weight for label, choice in choices.items() if choice.weight is not None}


def rewards_of(data_source: str, choices: Mapping[str, Choice], own: bool = False) -> list[Choice]:
    """The rewards of a row: those with a weight in `reward.scorers`, or the user's function, or its data_source's."""
    if weighted(choices):
        chosen = [c for c in choices.values() if c.weight is not None and c.is_for(data_source)]
        if not chosen:
            raise ValueError(f'reward.scorers has no reward for prompts with data_source "{data_source}"')
        return chosen
    if own:
        return [Choice(OWN, OWN, 1.0)]
    return [replace(choices.get(data_source, Choice(data_source, data_source)), weight=1.0)]


def combine(chosen: Sequence[Choice], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One answer of a row's rewards that are added up: `score` is their weighted sum.

    Each one's score stands under its label (where its gate is closed the gate's `else`, which is 0 unless set; the
    score that it had is then `<label>/score`), and with several of them what else it told under `<label>/<name>`.
    """
    if len(chosen) == 1:
        score = answers[0]["score"]
        return {**answers[0], chosen[0].label: score, "score": chosen[0].weight * score}
    told: dict[str, Any] = {}
    scores = {choice.label: answer["score"] for choice, answer in zip(chosen, answers, strict=True)}
    total = 0.0
    for choice, answer in zip(chosen, answers, strict=True):
        is_open = choice.gate is None or scores[choice.gate.by] >= choice.gate.at_least
        told[choice.label] = scores[choice.label] if is_open else choice.gate.otherwise
        if choice.gate is not None:
            told[f"{choice.label}/score"] = scores[choice.label]
        told |= {f"{choice.label}/{key}": value for key, value in answer.items() if key != "score"}
        total += choice.weight * told[choice.label]
    return {"score": total, **told}
