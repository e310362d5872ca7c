"""What a knob says of itself is what is checked: ranges, choices, and what it needs to have an effect."""

import dataclasses

import pytest

from verl_omni.config.knob import Range, check_effect, check_ranges, knob, walk


@dataclasses.dataclass
class Inner:
    rate: list[float] = knob([0.5], "each a share", above=0, most=1)
    every: int = knob(-1, "steps", least=1, also=(-1,))
    rows: int | str = knob(16, "at once, or auto", least=1, also=("auto",))
    kind: str | None = knob(None, "which", choices=lambda: ["a", "b"])


@dataclasses.dataclass
class Outer:
    inner: Inner = knob(Inner, "")
    switch: bool = knob(False, "on or off")
    strength: float = knob(1.0, "how much", needs="switch=true")
    later: int = knob(0, "some day", waits="nothing reads it")


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ({"rate": [0.5, 0.0]}, "inner.rate=0.0: expected above 0, at most 1"),
        ({"rate": [float("nan")]}, "inner.rate=nan: expected above 0, at most 1"),
        ({"every": 0}, "inner.every=0: expected -1 or 1 or more"),
        ({"rows": "many"}, "inner.rows=many: expected auto or 1 or more"),
        ({"rows": 0}, "inner.rows=0: expected auto or 1 or more"),
        ({"kind": "c"}, 'unknown inner.kind "c": known: a, b'),
    ],
)
def test_one_checker_reads_all_ranges(inner, said):
    with pytest.raises(ValueError) as caught:
        check_ranges(Outer(inner=Inner(**inner)))
    assert str(caught.value) == said


def test_what_is_within_its_range_passes():
    check_ranges(Outer(inner=Inner(rate=[1.0, 0.1], every=7, rows="auto", kind="b")))
    check_ranges(Outer())


def test_effect_depends_on_other_knobs():
    check_effect(Outer(switch=True, strength=2.0), Outer(switch=True, strength=2.0))
    check_effect(Outer(strength=1.0), Outer())
    with pytest.raises(
        ValueError, match="strength=2.0 has no effect with switch=false: leave it out, or set switch=true"
    ):
        check_effect(Outer(strength=2.0), Outer(strength=2.0))
    with pytest.raises(ValueError, match="later=1: nothing reads it; leave it 0"):
        check_effect(Outer(later=1), Outer(later=1))


def test_a_number_that_no_float_holds_is_outside():
    with pytest.raises(ValueError, match=r"^rate=10{39}: expected 1 or more$"):
        Range(least=1).check("rate", 10**400)


def test_help_shows_range_and_condition():
    shown = {k.name: k.text() for k in walk(Outer)}
    assert shown == {
        "inner.rate": "each a share [above 0, at most 1]",
        "inner.every": "steps [-1 or 1 or more]",
        "inner.rows": "at once, or auto [auto or 1 or more]",
        "inner.kind": "which",
        "switch": "on or off",
        "strength": "how much [only with switch=true]",
        "later": "some day [only 0 so far]",
    }
    assert Range(choices=("a", "b")).shown() == "one of a, b"
