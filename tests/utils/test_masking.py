"""Keys and passwords of the command line are in no file of the run."""

import pytest

from verl_omni.config.knob import walk
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.utils.masking import masked, masked_argument
from verl_omni.utils.secrets import revealed


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
        ("reward.scorers=[{name: http, headers: {X-Api-Key: q}}]", "reward.scorers=***"),
        ("reward.kwargs={'api key': q}", "reward.kwargs=***"),
        ("reward.kwargs.openaiApiKey=q", "reward.kwargs.openaiApiKey=***"),
        ("judge.command='serve x --api-key q --port 1'", "judge.command='serve x --api-key *** --port 1'"),
        ("judge.command='serve x --token=q'", "judge.command='serve x --token=***'"),
        # by shape
        ("reward.kwargs={auth: {bearer: xyz}}", "reward.kwargs=***"),
        ("reward.kwargs.auth.user=me", "reward.kwargs.auth.user=***"),
        ("reward.kwargs.x=sk-proj-abcdefghijklmnop", "reward.kwargs.x=***"),
        ("reward.kwargs.x='Bearer abcdefgh12'", "reward.kwargs.x=***"),
        ("a.address=https://me:pass@host/x?n=1", "a.address=https://me:***@host/x?n=1"),
        ("a.address=https://host/x?n=1&access_token=abc&m=2", "a.address=https://host/x?n=1&access_token=***&m=2"),
        ("https://me:pass@host", "https://me:***@host"),
        ("a.address=https://host/x?X-Amz-Signature=abc;m=2", "a.address=https://host/x?X-Amz-Signature=***;m=2"),
        ("a.address=https://host/x?key=abc", "a.address=https://host/x?key=***"),
        # a reference tells nothing
        ("reward.kwargs.api_key=env:MY_KEY", "reward.kwargs.api_key=env:MY_KEY"),
        ("reward.kwargs.api_key=file:~/key", "reward.kwargs.api_key=file:~/key"),
        # no secrets
        ("data.prompt_key=prompt", "data.prompt_key=prompt"),
        ("judge.command='x --max-tokens 5 --tokenizer t'", "judge.command='x --max-tokens 5 --tokenizer t'"),
        ("reward.kwargs={maxTokens: 5, image_key: a}", "reward.kwargs={maxTokens: 5, image_key: a}"),
        ("actor_rollout_ref.rollout.http.token_file=/t", "actor_rollout_ref.rollout.http.token_file=/t"),
        ("trainer.experiment_name=sk-flux", "trainer.experiment_name=sk-flux"),
        ("data.train_files=https://host:8080/x@y", "data.train_files=https://host:8080/x@y"),
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


@pytest.mark.parametrize(
    "name",
    [
        *("X-Api-Key", "api-key", "api_keys", "apiKeys", "apiKey", "APIKey", "openaiApiKey", "api_key_2", "api key"),
        *("accessToken", "authToken", "refresh_token", "access_tokens", "pwd", "dbPwd", "userPassword", "clientSecret"),
        *("Ocp-Apim-Subscription-Key", "AWS_SECRET_ACCESS_KEY", "Proxy-Authorization", "Set-Cookie", "cookies", "jwt"),
    ],
)
def test_ways_to_spell_a_secret(name):
    assert masked({"headers": [{name: "q", "x": 1}]}) == {"headers": [{name: "***", "x": 1}]}


@pytest.mark.parametrize("name", ["tokens", "maxTokens", "tokenizer", "prompt_key", "keys", "author", "cwd"])
def test_what_only_looks_like_one(name):
    assert masked({name: "q"}) == {name: "q"}


def test_all_below_a_name_that_says_so_and_whatever_has_the_shape():
    jwt = "eyJhbGciOiJI.eyJzdWIiOiIx.c2ln"
    tree = {"auth": {"bearer": "X", "user": ["me", 7], "on": True, "none": None}, "x": [f"hf_{'a' * 20}", jwt, "kept"]}
    assert masked(tree) == {
        "auth": {"bearer": "***", "user": ["***", "***"], "on": True, "none": None}, "x": ["***", "***", "kept"]
    }  # fmt: skip
    assert masked({"api_key": "env:MY_KEY", "token": "file:/key"}) == {"api_key": "env:MY_KEY", "token": "file:/key"}


def test_no_setting_of_ours_is_taken_for_a_secret():
    for name, default, *_ in walk(DiffusionTrainerConfig):
        assert masked({name: default}) == {name: default}


def test_a_secret_is_looked_up_by_who_uses_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "from the environment")
    (tmp_path / "key").write_text("from a file\n")
    given = {"auth": {"bearer": "env:MY_KEY"}, "keys": [f"file:{tmp_path}/key"], "x": "file:///x", "n": 3}
    assert revealed(given, "kwargs") == given | {"auth": {"bearer": "from the environment"}, "keys": ["from a file"]}


@pytest.mark.parametrize("reference", ["env:NO_SUCH_NAME", "file:/no/such/file", "file:/dev/null", "file:{f}/empty"])
def test_one_that_is_not_there_is_named(tmp_path, reference):
    (tmp_path / "empty").write_text("")
    reference = reference.format(f=tmp_path)
    with pytest.raises(ValueError, match=f"kwargs.auth.bearer={reference}: "):
        revealed({"auth": {"bearer": reference}}, "kwargs")
