"""What the console says of a run that does not learn, when, and that docs/debugging.md has the same words."""

from pathlib import Path

import pytest

from benchmarks.symptoms import ROWS
from verl_omni.trainer.diffusion import symptoms
from verl_omni.trainer.diffusion.symptoms import Symptom, Symptoms

ROOT = Path(__file__).parents[2]
ALL = [thing for thing in vars(symptoms).values() if isinstance(thing, Symptom)]
HEALTHY = {
    "actor/pg_clipfrac": 0.2,
    "actor/grad_norm": 0.05,
    "critic/rewards/mean": 0.5,
    "critic/rewards/std_mean": 0.2,
    "critic/rewards/zero_std_ratio": 0.0,
    "critic/rewards/group_size": 16.0,
    "critic/diversity": 0.2,
}


def said(courses, steps=40, updates=20):
    """All lines of a run in which some metrics take another course than a healthy one's."""
    watch, lines = Symptoms(updates), []
    for i in range(steps):
        rising = HEALTHY | {"critic/rewards/mean": 0.5 + 0.01 * i + 0.005 * (i % 2)}
        lines += watch.see(rising | {name: course(i) for name, course in courses.items()})
    return lines


SICK = {
    symptoms.CLIPPED: {"actor/pg_clipfrac": lambda i: 0.95},
    symptoms.EXPLODES: {"actor/grad_norm": lambda i: 0.05 * 2**i},
    symptoms.FLAT_REWARD: {"critic/rewards/mean": lambda i: 0.5 + 0.01 * (i % 2)},
    symptoms.ALIKE: {"critic/rewards/zero_std_ratio": lambda i: 0.6},
    symptoms.NOISY: {"val-core/ocr_line/reward/mean@1": lambda i: 0.9, "critic/rewards/mean": lambda i: 0.2 + 0.01 * i},
    symptoms.FEW: {"critic/rewards/group_size": lambda i: 2.0},
    symptoms.SAME: {"critic/diversity": lambda i: 0.2 - 0.004 * i},
    symptoms.STALE: {"staleness/mean": lambda i: 3.0, "actor/pg_clipfrac": lambda i: 0.6},
}


def test_each_has_its_case():
    assert {*SICK} == {*ALL} and len(ALL) >= 7


@pytest.mark.parametrize("symptom", ALL, ids=lambda symptom: symptom.words)
def test_each_is_said_once_and_alone(symptom):
    (line,) = said(SICK[symptom])
    assert line.startswith(f"{symptom.words} ({symptom.metric} ") and line.endswith(f": {symptom.remedy}")


def test_a_healthy_run_is_left_alone():
    assert said({"val-core/ocr_line/reward/mean@1": lambda i: 0.6 + 0.01 * i, "staleness/mean": lambda i: 3.0}) == []


def test_the_first_update_of_a_step_clips_nothing():
    """With two of them, half is all that can be clipped; with one, nothing."""
    assert said({"actor/pg_clipfrac": lambda i: 0.48}, updates=2)[0].startswith("nearly every ratio is clipped")
    assert said({"actor/pg_clipfrac": lambda i: 0.0}, updates=1) == []


def test_the_only_update_of_a_step_clips_what_is_stale():
    (line,) = said(SICK[symptoms.STALE], updates=1)
    assert line.startswith("samples are old and their ratios are clipped (staleness/mean 3, actor/pg_clipfrac 0.60 of")


def test_a_gradient_may_explode_from_the_third_step_on():
    """As with a learning rate of 2e-2 on the quickstart's task."""
    norms = [0.28, 0.307, 1.342, 3.492, 2.732, 3.376, 3.25]
    (line,) = said({"actor/grad_norm": lambda i: norms[i]}, steps=len(norms))
    assert line.startswith("the gradient explodes (actor/grad_norm 0.307 at first, now 3.25): ")


def test_images_that_become_alike_while_nothing_is_won_are_no_symptom():
    """A reward that falls has words of its own."""
    falling = {"critic/rewards/mean": lambda i: 0.5 - 0.01 * i - 0.005 * (i % 2)}
    assert said(SICK[symptoms.SAME] | falling) == []
    assert said({"critic/diversity": lambda i: 0.2 if i < 20 else 0.11}) == []


def test_images_become_alike_before_the_first_steps_are_out_of_sight():
    (line,) = said({"critic/diversity": lambda i: 0.2 if i < 5 else 0.09}, steps=10)
    assert "(critic/diversity 0.2 at first, now 0.09): " in line
    assert said({"critic/diversity": lambda i: 0.2 if i < 5 else 0.09}, steps=9) == []


def test_one_bad_step_is_no_symptom():
    once = {"actor/pg_clipfrac": lambda i: float(i == 7), "actor/grad_norm": lambda i: 9.0 if i == 7 else 0.05}
    assert said(once) == []


def test_the_page_on_debugging_has_the_same_words():
    page = (ROOT / "docs/debugging.md").read_text()
    for symptom in ALL:
        assert symptom.words in page and f"`{symptom.metric}`" in page
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {symptom.words} |")]
        for setting in symptom.remedy.replace(",", " ").split():
            if "." in setting:
                assert setting in row, (symptom.words, setting)


def test_each_run_that_is_spoiled_has_words_of_the_console():
    for name, row in ROWS.items():
        assert row.words or name in ("guidance", "as shipped") or name.startswith(("hacking ", "reward gradient"))
