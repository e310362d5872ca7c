"""The trial's own cases and judgement; the trial itself takes an hour and is not a test."""

import runpy

import pytest
import table
from cases_faults import CASES as FAULTS
from faults import MOMENTS as MODULE
from inputs import BadInput, attempt
from trial import all_cases, read, title
from watch import faults_of, lines

MOMENTS = {"loading", "rollout", "validation", "rewards", "update", "save"}


def test_the_cases_are_many_and_no_two_have_one_name():
    titles = [title(case) for case in all_cases()]
    assert len(set(titles)) == len(titles)
    assert sum(t.startswith("input:") for t in titles) >= 80 and sum(t.startswith("fault:") for t in titles) >= 20


def test_every_bad_input_has_to_be_named():
    for case in all_cases():
        if case.kind == "input":
            assert case.words() and all(case.words()), case.name


def test_every_fault_can_happen():
    deeds = runpy.run_path(str(MODULE), run_name="read")["DEEDS"]  # imported, it would act on the runs of other tests
    for case in FAULTS:
        assert case.order or case.outside or case.given or case.arguments or case.env, case.name
        if case.order:
            assert case.order["at"] in MOMENTS and case.order["do"] in deeds, case.name
        assert case.ends in ("fails", "succeeds")


TRACEBACK = 'Traceback (most recent call last):\n  File "/x.py", line 3, in f\nValueError: no'


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("error: trainer.seed=-1: expected 0 or more\n", True),
        ("training:   0%|     | 0/3 [00:00<?, ?step/s]\r\x1b[Aerror: the reward failed\n\n", True),
        (TRACEBACK, False),
        (f"(DiffusionWorker pid=71) {TRACEBACK}\nerror: a line after it\n", False),
        ("*** SIGTERM received at time=1 on cpu 0 ***\nerror: stopped\n", False),
        ("error: " + "x" * 500, False),
        ("", False),
    ],
)
def test_one_line_in_the_users_words(text, good):
    assert (faults_of(lines(text)) == []) == good


def test_a_bad_input_that_is_refused_and_one_that_is_not_said_clearly(tmp_path):
    """The real command, which ends within seconds at a misspelt key."""
    good = BadInput("x", "misspelt", ("trainer.sav_freq=1",), ("trainer.save_freq",))
    result = attempt(good, tmp_path / "good")
    assert result["why"] == [] and result["code"] == 1 and result["line"].startswith("error: unknown config key")
    vague = BadInput("x", "misspelt", ("trainer.sav_freq=1",), ("words that it does not say",))
    assert attempt(vague, tmp_path / "vague")["why"] == ['does not say "words that it does not say"']


def test_results_are_read_back_and_tabulated(tmp_path):
    first = '{"kind": "fault", "theme": "t", "name": "n", "passed": false, "why": ["hangs"], "line": ""}\n'
    last = (
        '{"kind": "fault", "theme": "t", "name": "n", "passed": true, "why": [], "line": "error: a | b", "code": 1, '
        '"seconds": 2.4, "same": true, "repeated": [2]}\n'
    )
    (tmp_path / "r.jsonl").write_text(first + last)
    (result,) = read(tmp_path / "r.jsonl").values()
    text = table.faults_table([result])
    assert "1 tried, 1 as they should be." in text
    assert "| n | `error: a \\| b` | 2 | 1 | step 2 done again; then the same metrics and weights |" in text
