"""What a rare GPU has measured is kept for good, and stands in the tables under the names of its settings."""

import dataclasses
import json
import sys
import types

import pytest
from composed import composed

from benchmarks import measured, plan_check, scale, scale_tables
from benchmarks.plan_check import CASES

SETTINGS = {setting.name: setting for settings in scale.GROUPS.values() for setting in settings}
TITLES = {case.title for case in CASES}
SINGLE, MANY = "flux-dev: LoRA, folded, rank 0 of 1", "flux-dev: LoRA, folded, rank 0 of 8"


def test_every_name_is_that_of_one_setting():
    assert len(TITLES) == len(CASES)
    assert set(measured.read()) <= TITLES | set(SETTINGS)
    assert set(scale_tables.ARCHITECTURES) <= TITLES and {SINGLE, MANY, scale_tables.SINGLE} <= SETTINGS.keys()


STEPS = [setting.given[-1] for setting in SETTINGS.values() if setting.work is not scale.make]


@pytest.mark.parametrize("overrides", STEPS, ids=" ".join)
def test_settings_are_known(overrides):
    composed(*overrides)


def test_a_case_is_measured_as_it_is_planned():
    for case in CASES:
        if case.title in SETTINGS:
            work, *middle, overrides = SETTINGS[case.title].given
            asked = [case.ranks, case.images, case.lora] if case.ranks else [case.images]
            assert (work, middle, overrides) == (case.work, asked, case.overrides)


def test_figures_are_kept_beside_those_that_are_there(tmp_path):
    file = tmp_path / "measured.json"
    file.write_text('{"a": {"peak GiB": 1.0}, "b": {"peak GiB": 2.0}}')
    there = measured.keep({"b": {"peak GiB": 3.14159, "timing_s/save": 9.0}, "c": {"attention": "native"}}, file)
    assert there == {"a": {"peak GiB": 1.0}, "b": {"peak GiB": 3.142}, "c": {"attention": "native"}}
    assert measured.read(file) == there and len(file.read_text().splitlines()) == 5


def test_of_few_layers_and_of_what_failed_nothing_is_kept():
    name = "glm-image: LoRA, micro-batch 4"
    found = {name: {"peak GiB": 1.0}, f"{name} (small)": {"peak GiB": 1.0}, MANY: {"error": "no"}}
    assert scale.of_docs(found | {"the generator of words": {"score": 0.5}}) == {name: {"peak GiB": 1.0}}


def test_the_tables_say_what_was_measured():
    there = {
        "flux-dev: LoRA, micro-batch 4": {"images": 16, "images/s": 1.58, "step s": 10.14, "peak GiB": 53.44,
                                          "attention": "_native_flash", "actor/first_ratio_max_dev": 0.0},
        SINGLE: {"rows": 8, "update s": 1.0, "update GiB": 27.0},
        MANY: {"rows": 16, "update s": 2.2, "update GiB": 8.1},
    }  # fmt: skip
    marks = ("ARCHITECTURES", "EIGHT BITS", "RANKS")
    text = "".join(f"<!-- {mark} -->\nbefore that\n<!-- /{mark} -->\n" for mark in marks)
    filled = scale_tables.filled(f"before\n{text}", there, scale.titles())
    row = "| FLUX.1-dev 12B, guidance 3.5 | 16 | 1.58 | 10.14 | 53.4 | 0 | `_native_flash` |"
    assert row in filled and "GLM-Image" not in filled and "before that" not in filled
    assert "| setting | rows | update, GiB | update, s | a row's update, to that of one rank alone |" in filled
    assert f"| {MANY} | 16 | 8.1 | 2.200 | 1.100 |" in filled and f"| {SINGLE} | 8 | 27.0 | 1.000 | 1.000 |" in filled
    assert "<!-- EIGHT BITS -->\nNothing has been measured yet.\n" in filled  # flux-dev in full has nothing beside it
    with pytest.raises(ValueError, match="has no <!-- ARCHITECTURES -->, "):
        scale_tables.filled("nothing", there, scale.titles())


def test_write_measures_nothing_and_keeps_what_was_found(tmp_path, monkeypatch):
    kept, document = tmp_path / "measured.json", tmp_path / "page.md"
    kept.write_text(json.dumps({SINGLE: {"rows": 8, "update s": 1.0}}))
    (tmp_path / "found.json").write_text(json.dumps({MANY: {"rows": 8, "update s": 1.05}}))
    document.write_text("<!-- RANKS -->\n<!-- /RANKS -->\n")
    keep = measured.keep
    monkeypatch.setattr(measured, "keep", lambda found: keep(found, kept))
    monkeypatch.setattr(sys, "argv", ["scale", "--out", str(tmp_path), "--write", str(document)])
    scale.main()
    assert "1.050 |" in document.read_text() and set(measured.read(kept)) == {SINGLE, MANY}


def test_what_was_measured_stands_beside_the_plan(tmp_path, monkeypatch):
    """Of a step the stages that a plan knows; of one rank of many its update."""
    monkeypatch.setattr(plan_check, "planned", lambda case, folder, known: (11.0, 2.0))
    step = plan_check.Case("tiny-sd3", "a step", 8)
    cases = [step, dataclasses.replace(step, name="a rank", ranks=8), dataclasses.replace(step, name="nobody's")]
    there = {
        "tiny-sd3: a step": {"peak GiB": 10.0, "step s": 2.5, "stages s": 2.0},
        "tiny-sd3: a rank": {"update GiB": 11.0, "update s": 4.0, "rollout s": 9.0},
    }
    assert list(plan_check.rows(cases, there, tmp_path))[2:] == [
        "| tiny-sd3 | a step | 10.0 | 11.0 | +10% | 2.00 | 2.00 | +0% |",
        "| tiny-sd3 | a rank | 11.0 | 11.0 | +0% | 4.00 | 2.00 | -50% |",
        "| tiny-sd3 | nobody's |  | 11.0 |  |  | 2.00 |  |",
    ]


def test_what_rounding_does_to_the_policy_is_kept(monkeypatch):
    engine = types.SimpleNamespace(attention="native")
    trainer = types.SimpleNamespace(actor_wg=types.SimpleNamespace(engine=engine))
    told = {"timing_s/step": 4.0, "timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "rollout_corr/kl": 1e-4, "lr": 1.0}
    monkeypatch.setattr(scale, "two_steps", lambda *given: (trainer, told))
    found = scale.metrics("sd35m", 8, [], None)
    assert found["rollout_corr/kl"] == 1e-4 and "lr" not in found
    assert (found["images/s"], found["step s"], found["stages s"], found["attention"]) == (2.0, 4.0, 3.0, "native")
