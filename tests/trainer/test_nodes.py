"""What each machine of a cluster has to have: paths that mean the same on all, and one line where one of them lacks
something."""

import os
import sys
from pathlib import Path

import pytest
from composed import composed
from tiny_models import tiny_checkpoint

from verl_omni.trainer import nodes
from verl_omni.trainer.checks.machines import needed_paths, variables_of_rewards
from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.trainer.run_folder.checkpointing import check_all_seen
from verl_omni.trainer.run_folder.manifest import CheckpointError

REWARDS = (
    "reward.scorers=[{name: pickscore, model: scorer, processor: '~/p/q'}, {name: http, address: 'http://h/x', "
    "token_env: MINE}, {name: jpeg_compressibility}, {name: vlm_judge, address: 'http://h', api_key: 'file:key', "
    "model: a/b}]"
)


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Settings as somebody types them in a folder where all of it lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/p/q").mkdir(parents=True)
    for name in ("mine.py", "train.txt", "key", "words.txt"):
        Path(name).write_text("a cat\n")
    Path("registers.py").write_text("")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "registers", raising=False)
    for name in ("scorer", "lists", "jpeg_compressibility"):
        Path(name).mkdir()
    Path("model").symlink_to(tiny_checkpoint())
    Path("lists/val.txt").write_text("a dog\n")
    return [
        *("actor_rollout_ref.model.path=./model", "data.train_files=[train.txt]", "data.val_files=lists/val.txt"),
        *("reward.custom_reward_function.path=mine.py", "trainer.callbacks=['mine.py:Mine','a.module.Mine']"),
        *(f"+reward.custom_reward_function.reward_kwargs.{given}" for given in ("words=./words.txt", "kind=lists")),
        *("+reward.custom_reward_function.reward_kwargs.name=a/b", REWARDS),
        *("trainer.default_local_dir=runs/one", "trainer.device=cpu"),
        "actor_rollout_ref.model.external_lib='json,registers.py'",
    ]


def test_every_path_means_the_same_on_another_machine(typed, tmp_path):
    config = prepare_config(composed(*typed, "ray.address=10.0.0.1:6379"))
    assert config.actor_rollout_ref.model.path == f"{tmp_path}/model"
    assert config.data.train_files == [f"{tmp_path}/train.txt"] and config.data.val_files == f"{tmp_path}/lists/val.txt"
    own = config.reward.custom_reward_function
    assert own.path == f"{tmp_path}/mine.py"
    assert own.reward_kwargs == {"words": f"{tmp_path}/words.txt", "kind": "lists", "name": "a/b"}
    assert config.trainer.callbacks == [f"{tmp_path}/mine.py:Mine", "a.module.Mine"]
    assert config.actor_rollout_ref.model.external_lib == f"json,{tmp_path}/registers.py"
    assert config.trainer.default_local_dir == f"{tmp_path}/runs/one"
    pick, http, jpeg, judge = config.reward.scorers
    assert (pick.name, pick.model, pick.processor) == ("pickscore", f"{tmp_path}/scorer", f"{tmp_path}/home/p/q")
    assert http.address == "http://h/x" and jpeg.name == "jpeg_compressibility"
    assert (judge.api_key, judge.model) == (f"file:{tmp_path}/key", "a/b")

    needed = needed_paths(config)
    assert all(os.path.isabs(path) and os.path.exists(path) for _, path in needed)
    assert {path.removeprefix(f"{tmp_path}/") for _, path in needed} == {
        *("model", "train.txt", "lists/val.txt", "mine.py", "words.txt", "scorer", "home/p/q", "key"),
        "registers.py",
    }
    assert variables_of_rewards(config) == [("reward.scorers.token_env", "MINE")]


def test_on_one_machine_a_user_sees_what_was_typed(typed):
    config = prepare_config(composed(*typed))
    assert config.actor_rollout_ref.model.path == "./model" and config.reward.scorers[0].model == "scorer"
    assert config.trainer.default_local_dir == "runs/one"


def test_variables_to_take_along_are_there(typed, monkeypatch):
    monkeypatch.setenv("MINE", "x")
    for given, said in (
        ("[NOT_SET]", "ray.env_vars: there is no environment variable NOT_SET here"),
        ("[PYTHONPATH]", "ray.env_vars: PYTHONPATH is set for every process by the run itself"),
    ):
        with pytest.raises(ValueError, match=said):
            prepare_config(composed(*typed, "ray.address=h:1", f"ray.env_vars={given}"))
    with pytest.raises(ValueError, match="ray.env_vars=.*has no effect with ray.address=null"):
        prepare_config(composed(*typed, "ray.env_vars=[MINE]"))
    from verl_omni.trainer.resources import ray_arguments

    config = prepare_config(composed(*typed, "ray.address=h:1", "ray.env_vars=[MINE]"))
    assert ray_arguments(config)["runtime_env"]["env_vars"]["MINE"] == "x"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "SECONDS", 0.0)
    (tmp_path / "mark").touch()
    return nodes.Asked(nodes.versions(), [], [("data.train_files", str(tmp_path))], [("r.key", "HOME")], str(tmp_path),
                       "mark")  # fmt: skip


def test_a_node_that_has_all(asked, tmp_path):
    nodes.has_all(asked, "n1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mark", "mark_n1"]


@pytest.mark.parametrize(
    "lacking, said",
    [
        ({"versions": {"torch": "1.0"}}, "^torch is 2.*, and 1.0 where the run was started: install that$"),
        ({"versions": {"nonsuch": "1.0"}}, "^nonsuch is not there, and 1.0"),
        ({"external_lib": ["no_such_module"]}, 'external_lib="no_such_module" cannot be imported'),
        ({"paths": [("data.train_files", "/no/such")]}, '^data.train_files="/no/such" is not there: put it on a disk'),
        ({"variables": [("r.key", "NO_SUCH")]}, r"^r.key names NO_SUCH, .* with ray.env_vars=\[NO_SUCH\]$"),
        ({"mark": "other"}, "^trainer.default_local_dir=.* is another folder there than where the run was started"),
    ],
)
def test_what_a_node_lacks_is_one_line(asked, lacking, said):
    with pytest.raises((ValueError, ModuleNotFoundError), match=said):
        nodes.has_all(asked._replace(**lacking), "n1")


def test_a_checkpoint_of_which_a_rank_sees_more_than_the_trainer_is_none(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state/a").write_bytes(b"12345")
    check_all_seen(tmp_path, [{"state/a": 5}, {"state/a": 5}])
    check_all_seen(tmp_path, [{"state/a": 0}, {"state/a": 5}])  # of another machine's file a rank may see less yet
    with pytest.raises(CheckpointError, match="rank 1 has written state/b of a checkpoint to a disk that the trainer "):
        check_all_seen(tmp_path, [{"state/a": 5}, {"state/a": 5, "state/b": 1}])
    (tmp_path / "state/a").write_bytes(b"123")  # what has come of it so far
    with pytest.raises(CheckpointError, match="rank 1 sees 5 bytes of state/a of a checkpoint, and the trainer 3: "):
        check_all_seen(tmp_path, [{"state/a": 3}, {"state/a": 5}])
