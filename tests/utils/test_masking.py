"""Keys and passwords of the command line are in no file of the run."""

import pytest

from verl_omni.utils.masking import masked, masked_argument


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("reward.reward_kwargs.api_key=sk-123", "reward.reward_kwargs.api_key=***"),
        ("++judge.access_token=abc", "++judge.access_token=***"),
        ("a.PASSWORD='x=y'", "a.PASSWORD=***"),
        ("reward.kwargs={url: http://x, api_key: sk-123}", "reward.kwargs=***"),
        ("judge.api_key=null", "judge.api_key=null"),
        ("actor_rollout_ref.model.tokenizer_path=/tok", "actor_rollout_ref.model.tokenizer_path=/tok"),
        ("reward.kwargs={max_tokens: 5}", "reward.kwargs={max_tokens: 5}"),
        ("trainer.seed=3", "trainer.seed=3"),
        ("-m", "-m"),
    ],
)
def test_arguments(argument, shown):
    assert masked_argument(argument) == shown


def test_trees():
    tree = {"a": {"api_key": "sk", "max_tokens": 5, "token": None}, "b": [{"secret": "s", "x": 1}], "tokens": "kept"}
    assert masked(tree) == {
        "a": {"api_key": "***", "max_tokens": 5, "token": None}, "b": [{"secret": "***", "x": 1}], "tokens": "kept"
    }  # fmt: skip
