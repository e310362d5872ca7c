"""`reward.scorers`: which rewards a row has, and how they are added up."""

import pytest

from verl_omni.rewards.choice import OWN, combine, read_choices, rewards_of, weighted

TWO = [{"name": "ocr", "matching": "contains"}, {"name": "pickscore", "weight": 0.3}]


def test_a_list_and_a_dict_with_weights_are_the_same():
    named = {"ocr": {"weight": 1, "matching": "contains"}, "pickscore": {"weight": 0.3}}
    assert read_choices(TWO) == read_choices(named)
    assert weighted(read_choices(TWO)) == {"ocr": 1.0, "pickscore": 0.3}
    assert read_choices(TWO)["ocr"].settings == {"matching": "contains"}


def test_a_key_is_the_label_where_an_entry_has_a_name():
    (choice,) = read_choices({"pick": {"name": "http", "weight": 1}}).values()
    assert (choice.label, choice.name) == ("pick", "http")


def test_a_name_alone_is_a_reward_with_weight_one():
    assert weighted(read_choices(["ocr", "jpeg_compressibility"])) == {"ocr": 1.0, "jpeg_compressibility": 1.0}


def test_settings_alone_leave_the_choice_to_the_data_source():
    choices = read_choices({"ocr": {"num_threads": 2}})
    assert weighted(choices) == {}
    (chosen,) = rewards_of("ocr", choices)
    assert (chosen.name, chosen.settings, chosen.weight) == ("ocr", {"num_threads": 2}, 1.0)
    (other,) = rewards_of("jpeg_compressibility", choices)
    assert (other.name, other.settings) == ("jpeg_compressibility", {})
    assert [c.name for c in rewards_of("ocr", {}, own=True)] == [OWN]


def test_rewards_by_data_source():
    choices = read_choices([
        {"name": "ocr", "data_sources": ["signs"]}, {"name": "geneval", "data_sources": "scenes"}, {"name": "pickscore"}
    ])  # fmt: skip
    assert [c.label for c in rewards_of("signs", choices)] == ["ocr", "pickscore"]
    assert [c.label for c in rewards_of("scenes", choices)] == ["geneval", "pickscore"]
    with pytest.raises(ValueError, match='no reward for prompts with data_source "other"'):
        rewards_of("other", read_choices([{"name": "ocr", "data_sources": ["signs"]}]))


def test_the_score_is_the_weighted_sum():
    chosen = rewards_of("x", read_choices(TWO))
    answer = combine(chosen, [{"score": 0.5, "ocr_text": "a"}, {"score": 20.0, "exact": 1.0}])
    assert answer == {
        "score": 0.5 + 0.3 * 20,
        "ocr": 0.5,
        "ocr/ocr_text": "a",
        "pickscore": 20.0,
        "pickscore/exact": 1.0,
    }


def test_one_reward_keeps_the_names_of_what_it_tells():
    answer = combine(rewards_of("x", read_choices(["ocr"])), [{"score": 0.5, "exact": 0.0}])
    assert answer == {"score": 0.5, "exact": 0.0, "ocr": 0.5}
    answer = combine(rewards_of("x", read_choices([{"name": "a", "weight": -2}])), [{"score": 3.0}])
    assert answer == {"score": -6.0, "a": 3.0}


@pytest.mark.parametrize(("ocr", "counted"), [(0.89, 0.0), (0.9, 7.0), (1.0, 7.0)])
def test_a_gate_lets_a_reward_count_only_where_another_passes(ocr, counted):
    choices = read_choices(
        [{"name": "ocr"}, {"name": "aesthetic", "weight": 2, "gate": {"by": "ocr", "at_least": 0.9}}]
    )
    answer = combine(rewards_of("x", choices), [{"score": ocr}, {"score": 7.0}])
    assert answer == {"score": ocr + 2 * counted, "ocr": ocr, "aesthetic": counted, "aesthetic/score": 7.0}


@pytest.mark.parametrize(("ocr", "counted"), [(0.4, -10.0), (0.6, -3.0)])
def test_a_closed_gate_is_no_better_than_a_reward_below_zero(ocr, counted):
    gate = {"by": "ocr", "at_least": 0.5, "else": -10}
    choices = read_choices([{"name": "ocr"}, {"name": "jpeg_compressibility", "gate": gate}])
    answer = combine(rewards_of("x", choices), [{"score": ocr}, {"score": -3.0}])
    assert answer["score"] == ocr + counted and answer["jpeg_compressibility"] == counted


BAD = {
    "gate else": ([{"name": "o"}, {"name": "a", "gate": {"by": "o", "at_least": 1, "else": "low"}}], "for a reward"),
    "gate with more": ([{"name": "o"}, {"name": "a", "gate": {"by": "o", "at_least": 1, "or": 1}}], "expected {by:"),
    "no list": ("ocr,pickscore", "expected a list of rewards"),
    "no name": ([{"weight": 1}], "expected a list of rewards"),
    "number": ([3], "expected a list of rewards"),
    "twice": (["ocr", "ocr"], 'has "ocr" twice: give one of them another `label`'),
    "weight": ([{"name": "ocr", "weight": "much"}], "reward.scorers.ocr.weight='much': expected a number other than 0"),
    "weight 0": ([{"name": "ocr", "weight": 0}], "expected a number other than 0"),
    "weight nan": ([{"name": "ocr", "weight": float("nan")}], "expected a number other than 0"),
    "gate": ([{"name": "ocr", "gate": 0.5}], "expected {by: <another reward>, at_least: <its least score>}"),
    "gate by nobody": (
        [{"name": "ocr"}, {"name": "a", "gate": {"by": "orc", "at_least": 1}}], 'unknown reward.scorers.a.gate.by "orc"'
    ),
    "gate by itself": ([{"name": "a", "gate": {"by": "a", "at_least": 1}}], "known: none"),
    "gate of other rows": (
        [{"name": "o", "data_sources": ["x"]}, {"name": "a", "gate": {"by": "o", "at_least": 1}}], "other data_sources"
    ),
    "gate without weight": ({"a": {"gate": {"by": "b", "at_least": 1}}}, "no effect without reward.scorers.a.weight"),
    "sources without weight": ({"a": {"data_sources": ["x"]}}, "no effect without reward.scorers.a.weight"),
    "the sum's own name": ([{"name": "ocr", "label": "score"}], 'the label "score" is that of the sum'),
    "processes": ([{"name": "ocr", "processes": -1}], "expected a whole number, 0 or more"),
    "gpus": ([{"name": "ocr", "gpus": 1}], "no effect without reward.scorers.ocr.processes"),
    "gpus and a half": ([{"name": "ocr", "processes": 1, "gpus": 1.5}], "expected a part of one GPU, such as 0.5"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_makes_no_sense_is_refused(case):
    given, said = BAD[case]
    with pytest.raises(ValueError) as refused:
        read_choices(given)
    assert said in str(refused.value)


def test_the_same_reward_twice_with_two_labels():
    choices = read_choices([{"name": "ocr"}, {"name": "ocr", "label": "strict", "matching": "contains", "weight": 2}])
    assert {label: (c.name, dict(c.settings)) for label, c in choices.items()} == {
        "ocr": ("ocr", {}), "strict": ("ocr", {"matching": "contains"})
    }  # fmt: skip
