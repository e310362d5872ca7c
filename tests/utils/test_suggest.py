import pytest

from verl_omni.utils.suggest import nearest, unknown


def test_message_names_the_typo_the_nearest_and_all_known():
    assert unknown("algorithm", "flow_grop", ["mix_grpo", "flow_grpo"]) == (
        'unknown algorithm "flow_grop": did you mean "flow_grpo"? known: flow_grpo, mix_grpo'
    )


@pytest.mark.parametrize("known, end", [(["sde", "cps"], "known: cps, sde"), ([], "known: none")])
def test_nothing_near_is_not_guessed(known, end):
    assert unknown("step type", "euler_ancestral", known) == f'unknown step type "euler_ancestral": {end}'


def test_a_long_list_is_cut():
    line = unknown("backend", "bogus", [f"backend_number_{i}" for i in range(50)])
    assert line.endswith(", ... (50 in all)") and "backend_number_0, backend_number_1, " in line and len(line) < 300


def test_nearest_ignores_case_and_answers_in_the_known_spelling():
    assert nearest("qwenimagepipline", ["QwenImagePipeline", "FluxPipeline"]) == ' Did you mean "QwenImagePipeline"?'
    assert nearest("video", ["QwenImagePipeline"]) == ""
