"""`algorithm.filter_groups`: prompts whose images all have the same reward are replaced, in every mode, and counted."""

import json
import math
import shutil
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from e2e_runs import metrics, prompts, run_here, settings
from refusals import refused
from test_group_queue import B, Simulation
from verl.protocol import DataProto

from verl_omni.config.algorithm import DiffusionAlgoConfig
from verl_omni.data.prompt_loader import create_dataloader
from verl_omni.trainer.diffusion.filter_groups import GroupFilter
from verl_omni.trainer.diffusion.group_queue import GroupQueue
from verl_omni.trainer.diffusion.prompts import PromptStream
from verl_omni.utils.arrays import object_array

NAN = math.nan


def scores(values: list[float], uids: str | None = None, told: list[dict] | None = None) -> DataProto:
    columns = {
        "uid": object_array(list(uids or "a" * len(values))),
        "reward_extra_info": object_array(told or [{}] * len(values)),
    }
    return DataProto.from_dict({"rm_scores": torch.tensor(values)[:, None]}, columns)


def group_filter(metric=None, weights=None) -> GroupFilter:
    algorithm = DiffusionAlgoConfig(reward_weights=weights or {})
    algorithm.filter_groups.metric = metric
    return GroupFilter(SimpleNamespace(algorithm=algorithm))


@pytest.mark.parametrize(
    ("values", "teaches"),
    [
        ([0.7] * 16, False),
        ([0.7] * 15 + [0.70001], True),
        ([0.5, NAN, 0.5], False),
        ([0.5, NAN, 0.6], True),
        ([0.5, NAN, NAN], True),  # a failure, of which others say what is wrong
        ([NAN, NAN], True),
    ],
)
def test_what_teaches_something(values, teaches):
    assert group_filter().teaches(scores(values)) == teaches


def test_branches_are_compared_each_by_itself():
    assert not group_filter().teaches(scores([0.1, 0.1, 0.2, 0.2], "aabb"))
    assert group_filter().teaches(scores([0.1, 0.1, 0.2, 0.3], "aabb"))


def test_the_metric_is_a_number_that_the_reward_tells():
    told = [{"acc": 1.0, "note": "x"}, {"acc": 1.0, "note": "y"}]
    assert not group_filter("acc").teaches(scores([0.1, 0.2], told=told))
    assert group_filter("seq_reward").teaches(scores([0.1, 0.2], told=told))
    for name in ("note", "accu"):
        with pytest.raises(ValueError, match=f'unknown algorithm.filter_groups.metric "{name}"'):
            group_filter(name).teaches(scores([0.1, 0.2], told=told))


def test_with_several_rewards_one_that_differs_is_enough():
    told = [{"sharp": 0.0}, {"sharp": 1.0}]
    assert group_filter(weights={"sharp": 1, "score": 1}).teaches(scores([0.5, 0.5], told=told))
    assert not group_filter(weights={"score": 1}).teaches(scores([0.5, 0.5], told=told))


class Numbers:
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return {"index": i}


def test_a_stream_goes_on_in_the_midst_of_a_batch():
    def taken(stream, *counts):
        return [stream.take(count).non_tensor_batch["index"].tolist() for count in counts]

    stream = PromptStream(create_dataloader(Numbers(), 2, shuffle=False, seed=0))
    assert taken(stream, None, 1) == [[0, 1], [2]]
    state = json.loads(json.dumps(stream.state_dict()))
    rest = taken(stream, None, 3, 2)
    assert rest[:2] == [[3, 4], [0, 1, 2]]
    loader = create_dataloader(Numbers(), 2, shuffle=False, seed=0)
    loader.load_state_dict(state)
    assert taken(PromptStream(loader), None, 3, 2) == rest
    assert "taken" not in PromptStream(create_dataloader(Numbers(), 2)).state_dict()


class Unequal(Simulation):
    """Every third group teaches nothing."""

    def _something_happens(self) -> None:
        for group in self.drawing:
            group.teaches = group.number % 3 > 0
        super()._something_happens()
        for number in range(self.opened, self.queue.horizon(self.version) + 1):
            self.queue.open(number)
            self.opened += 1


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("done", [1, 4, 8])
def test_groups_of_later_prompts_take_their_place(max_staleness, done):
    for seed in range(10):
        queue = GroupQueue(B, 8, 2, max_staleness, done=0, spare=2 * B)
        before = Unequal(queue, seed, overtaking=True).run(until=done)
        assert before.behind <= max_staleness and all(number % 3 for number in before.numbers)
        state = queue.state()
        queue = GroupQueue(B, 8, 2, max_staleness, **state, done=done, spare=2 * B)
        assert queue.passed_over == before.queue.passed_over > 0
        after = Unequal(queue, seed, overtaking=True, version=done).run(until=8)
        numbers = before.numbers + after.numbers
        assert len(numbers) == len(set(numbers)) == 8 * B and all(number % 3 for number in numbers)


def test_a_queue_of_which_nothing_teaches_goes_on_when_it_may_pass_over_no_more():
    queue = GroupQueue(B, 4, 1, 0, done=0, spare=B)
    simulation = Unequal(queue, 0, overtaking=False)
    enter = queue.enter
    queue.enter = lambda group: (setattr(group, "teaches", False), enter(group))
    simulation.run(until=4)
    assert queue.passed_over == 4 * B and len(simulation.numbers) == 4 * B


def test_what_cannot_be_filtered_is_refused_in_one_line():
    on = "algorithm.filter_groups.enable=true"
    assert "set actor_rollout_ref.rollout.n to 2 or more" in refused(on, "actor_rollout_ref.rollout.n=1")
    moving = "actor_rollout_ref.model.algorithm=mix_grpo"
    assert "set trainer.mode=one_step_off, or" in refused(on, "trainer.mode=fully_async", moving)
    assert "has no effect with algorithm.filter_groups.enable=false" in refused("algorithm.filter_groups.metric=acc")
    assert "algorithm.sample_source=online" in refused(on, "algorithm.sample_source=offline")


# ---- runs ----------------------------------------------------------------------------------------------

REWARD = """
FLAT = {flat}

def compute_score(image, prompt):
    if prompt in FLAT:
        return 0.5
    return (sum(image.convert("L").resize((2, 2)).getdata()) % 97) / 97
"""


def all_prompts() -> list[str]:
    rows = pd.read_parquet(prompts() / "train.parquet")["prompt"]
    return [row if isinstance(row, str) else row[0]["content"] for row in rows]


def filtered(folder, flat: list[str], *overrides: str) -> list[str]:
    (folder / "reward.py").write_text(REWARD.format(flat=flat))
    return settings(
        folder / "run", "reward.custom_reward_function.path=reward.py", "algorithm.filter_groups.enable=true",
        "data.val_files=null", "data.shuffle=false", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.pipeline.num_inference_steps=2", "trainer.save_freq=0", *overrides,
    )  # fmt: skip


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size=2",),
        ("actor_rollout_ref.model.algorithm=dpo",),
        ("trainer.mode=one_step_off",),
        ("trainer.mode=fully_async", "trainer.max_staleness=1"),
    ],
    ids=["colocated", "dpo", "one_step_off", "fully_async"],
)
def test_prompts_without_signal_are_replaced_in_every_mode(tmp_path, monkeypatch, process_group, capsys, overrides):
    """Of six prompts, the second, third and fourth are flat."""
    names = all_prompts()
    run_here(filtered(tmp_path, names[1:4], *overrides), tmp_path, monkeypatch)
    told = metrics(tmp_path / "run")
    for step in (1, 2, 3):
        assert told[step]["critic/rewards/zero_std_ratio"] == 0 and told[step]["actor/grad_norm"] > 0
        assert told[step]["filter_groups/without_signal"] == 0
        assert 0 < told[step]["critic/diversity"] < 1
    drawn, dropped = (sum(told[s][f"filter_groups/{k}"] for s in (1, 2, 3)) for k in ("drawn", "dropped"))
    said = capsys.readouterr().out
    if "fully_async" in overrides[0]:
        assert drawn >= 6 + dropped and dropped >= 3
        order = [json.loads(line)["data"]["groups"] for line in (tmp_path / "run/order.jsonl").read_text().splitlines()]
        assert {group["prompt"] for groups in order for group in groups} <= {0, 4, 5}
    else:
        # 0 1* | 2* | 3* | 4 ; 5 0 ; 1* 2* | 3* 4 | 5
        assert (drawn, dropped) == (12, 6)
        assert [told[s]["filter_groups/dropped"] for s in (1, 2, 3)] == [3, 0, 3]
        assert "step 1: 3 of 5 prompts had images of equal reward and were replaced\n" in said
        assert told[1]["filter_groups/reward_mean"] != told[1]["critic/rewards/mean"]
        assert told[2]["filter_groups/reward_mean"] == pytest.approx(told[2]["critic/rewards/mean"])


def test_a_filtered_run_goes_on_bit_for_bit(tmp_path, monkeypatch, process_group):
    arguments = filtered(tmp_path, all_prompts()[1:4], "actor_rollout_ref.actor.optim.lr=0.01", "trainer.save_freq=1")
    run_here(arguments, tmp_path, monkeypatch)
    straight = metrics(tmp_path / "run")
    state = json.loads((tmp_path / "run/global_step_1/trainer.json").read_text())["data"]
    assert state["taken"] == 1  # the step has ended in the midst of the third batch
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"run/global_step_{step}")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("1")
    run_here(arguments, tmp_path, monkeypatch)
    assert metrics(tmp_path / "run") == straight


def test_what_has_no_signal_after_the_last_batch_stays_and_is_said(tmp_path, monkeypatch, process_group, capsys):
    bound = "algorithm.filter_groups.max_num_gen_batches=2"
    run_here(filtered(tmp_path, all_prompts()[1:], bound, "trainer.total_training_steps=2"), tmp_path, monkeypatch)
    told = metrics(tmp_path / "run")
    assert [told[1][f"filter_groups/{k}"] for k in ("drawn", "dropped", "without_signal")] == [3, 1, 1]
    assert [told[2][f"filter_groups/{k}"] for k in ("drawn", "dropped", "without_signal")] == [4, 2, 1]
    said = capsys.readouterr().out
    assert "step 1: 1 of 3 prompts had images of equal reward and were replaced; 1 of 2 still have" in said


def test_a_replacement_is_drawn_by_the_rank_that_trains_on_its_place(tmp_path, monkeypatch, process_group):
    """So that its trajectory stays there, and any number of ranks gives the same update."""
    from verl_omni.testing.local_trainer import local_config, local_trainer
    from verl_omni.workers.layout import Layout

    monkeypatch.chdir(tmp_path)
    trainer = local_trainer(local_config(filtered(tmp_path, [], "actor_rollout_ref.actor.ppo_mini_batch_size=2")))
    trainer.layout, asked = Layout(shard=2), []
    trainer.rollouts.places = lambda ranks, samples: (asked.append(ranks), ([0] * samples, False))[1]
    trainer._draw = lambda *a: None
    rows = PromptStream(trainer.train_loader).take()
    trainer.start_groups(rows, 0, range(2), range(2), 2, True)
    trainer.start_groups(rows[[0]], 0, [2], [1], 2, True)
    assert asked == [[0] * 2 + [1] * 2, [1] * 2]
