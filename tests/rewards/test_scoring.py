"""A reward that fails: tried again, then the image leaves, and several in a row end the run."""

import asyncio
import math
import threading
from collections import Counter

import pytest
from omegaconf import OmegaConf
from test_reward_functions import sample

from verl_omni.rewards import scoring
from verl_omni.rewards.image_manager import ImageRewardManager
from verl_omni.rewards.registry import _REWARDS
from verl_omni.rewards.reward_function import RewardError
from verl_omni.utils.arrays import object_array


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(scoring, "FIRST_PAUSE", 0.0)


def scored(function, count: int = 4, source: str = "mine", in_turn: bool = False, uids=None, **reward) -> list:
    """What the manager answers for `count` images, of a prompt each or of the groups that `uids` name."""
    config = OmegaConf.create({"reward": {"batch_size": 4, "retries": 2, **reward}})

    async def run():
        manager = ImageRewardManager(config, None, compute_score=function)
        rows = [sample(i, source, None if in_turn else (i, count)) for i in range(count)]
        for row, uid in zip(rows, uids or (), strict=bool(uids)):
            row.non_tensor_batch["uid"] = object_array([uid])
            row.non_tensor_batch["prompt"] = object_array([f"prompt {uid}"])
        if in_turn:
            return [await manager.run_single(row) for row in rows]
        return await asyncio.gather(*(manager.run_single(row) for row in rows), return_exceptions=True)

    return asyncio.run(run())


class Flaky:
    """Fails the first `times` calls for each prompt in `bad`."""

    def __init__(self, bad: set[str], times: float):
        self.bad, self.times, self.calls = bad, times, Counter()

    def one(self, prompt):
        self.calls[prompt] += 1
        if prompt in self.bad and self.calls[prompt] <= self.times:
            raise ConnectionError("judge is away")
        return 0.5

    def many(self, images, prompts):
        return [self.one(prompt) for prompt in prompts]


@pytest.mark.parametrize("shape", ["one", "many"])
def test_a_blip_costs_nothing(shape):
    flaky = Flaky({"prompt 1"}, times=2)
    assert [a["reward_score"] for a in scored(getattr(flaky, shape))] == [0.5] * 4
    assert flaky.calls["prompt 1"] == 3


@pytest.mark.parametrize("shape", ["one", "many"])
def test_what_fails_for_good_has_no_score(shape):
    flaky = Flaky({"prompt 1"}, times=math.inf)
    answers = scored(getattr(flaky, shape))
    assert [a["reward_score"] for a in answers if "reward_failure" not in a] == [0.5] * 3
    assert math.isnan(answers[1]["reward_score"]) and answers[1]["reward_extra_info"] == {}
    assert "raised ConnectionError: judge is away" in answers[1]["reward_failure"]
    assert flaky.calls["prompt 1"] == (3 if shape == "one" else 4)  # a batch, and then three times by itself


def test_on_failure_stop():
    answers = scored(Flaky({"prompt 1"}, math.inf).one, on_failure="stop", retries=0)
    assert isinstance(answers[1], RewardError) and "judge is away" in str(answers[1])
    assert "in a row" not in str(answers[1])


def test_several_in_a_row_end_the_run_with_the_rewards_own_words():
    bad = {f"prompt {i}" for i in (0, 2, 3, 4)}
    with pytest.raises(RewardError, match="judge is away.*; so it went for 3 prompts in a row .reward.max_failures=3."):
        scored(Flaky(bad, math.inf).one, count=5, in_turn=True)


def test_a_score_between_begins_a_new_count():
    bad = {f"prompt {i}" for i in (0, 1, 3, 4)}
    answers = scored(Flaky(bad, math.inf).one, count=6, in_turn=True)
    assert [math.isnan(a["reward_score"]) for a in answers] == [True, True, False, True, True, False]


@pytest.mark.parametrize("shape", ["one", "many"])
@pytest.mark.parametrize("in_turn", [True, False])
def test_images_of_one_prompt_fail_together_and_count_once(shape, in_turn):
    bad = {"prompt a", "prompt c"}
    answers = scored(getattr(Flaky(bad, math.inf), shape), 12, in_turn=in_turn, uids="aaaabbbbcccc")
    assert [math.isnan(a["reward_score"]) for a in answers] == [True] * 4 + [False] * 4 + [True] * 4


def test_prompts_are_what_is_counted():
    bad = {f"prompt {uid}" for uid in "acd"}
    function = Flaky(bad, math.inf).one
    assert len(scored(function, 9, in_turn=True, uids="aabccaadb", max_failures=4)) == 9
    with pytest.raises(RewardError, match="for 3 prompts in a row .reward.max_failures=3."):
        scored(function, 9, in_turn=True, uids="aabccaadb")


def test_the_same_prompt_in_another_step_counts_again():
    def away(prompt):
        raise ConnectionError("judge is away")

    with pytest.raises(RewardError, match="for 3 prompts in a row"):
        scored(away, 3, in_turn=True, uids=["1-0", "2-0", "3-0"])


def test_nan_and_a_wrong_count_are_failures_too():
    answers = scored(lambda prompt: float("nan") if prompt == "prompt 2" else 1.0)
    assert [math.isnan(a["reward_score"]) for a in answers] == [False, False, True, False]
    answers = scored(lambda images: [1.0] * (len(images) - 1), count=2)
    assert all("returned 1 for 2 images" in a["reward_failure"] for a in answers)


def test_an_answer_that_hangs_is_not_asked_for_again():
    calls = []

    async def hangs(prompt):
        calls.append(prompt)
        if prompt == "prompt 1":
            await asyncio.sleep(60)
        return 1.0

    answers = scored(hangs, timeout=0.3)
    assert "gave no answer within 0.3 s" in answers[1]["reward_failure"] and calls.count("prompt 1") == 1


def test_a_call_that_fails_counts_once_however_many_images_it_had():
    answers = scored(lambda images: [1.0] * (len(images) - 1), count=8, in_turn=False, max_failures=3)
    assert all("returned 3 for 4 images" in a["reward_failure"] for a in answers), "two calls, eight images"


def test_calls_that_hang_keep_no_other_from_beginning(monkeypatch):
    """More of them than calls may run at once, which are five."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    leave = threading.Event()

    def hangs(prompt):
        if int(prompt.split()[1]) < 8:
            leave.wait(60)
        return 1.0

    try:
        answers = scored(hangs, count=12, timeout=2, max_failures=100)
    finally:
        leave.set()
    assert [a["reward_score"] for a in answers[8:]] == [1.0] * 4
    assert all("gave no answer" in a["reward_failure"] for a in answers[:8])


class Loads:
    loaded = 0

    def __init__(self, *, path: str = "here"):
        type(self).loaded += 1
        if path == "nowhere":
            raise FileNotFoundError("no model in nowhere")
        self.path = path

    def __call__(self, images, ground_truths, prompts, extra_infos):
        return [{"score": 2.0, "path": self.path} for _ in images]


@pytest.fixture
def loads(monkeypatch):
    _REWARDS.names()
    monkeypatch.setattr(_REWARDS, "_entries", dict(_REWARDS._entries))
    monkeypatch.setattr(Loads, "loaded", 0)
    _REWARDS.add("loads", Loads)


def test_a_class_is_loaded_once(loads):
    answers = scored(None, count=9, source="loads", scorers={"loads": {"path": "there"}})
    assert [a["reward_score"] for a in answers] == [2.0] * 9 and Loads.loaded == 1
    assert answers[0]["reward_extra_info"] == {"path": "there"}


def test_a_model_that_cannot_be_loaded_ends_the_run_at_once(loads):
    answers = scored(None, source="loads", scorers={"loads": {"path": "nowhere"}})
    said = 'reward function "loads" cannot be loaded: FileNotFoundError: no model in nowhere'
    assert [str(a) for a in answers] == [said] * 4


def test_several_rewards_and_the_users_own(loads):
    scorers = [{"name": "loads", "weight": 0.5}, {"name": "custom_reward_function", "weight": 10}]
    answers = scored(lambda prompt: float(prompt[-1]), scorers=scorers)
    assert [a["reward_score"] for a in answers] == [1.0, 11.0, 21.0, 31.0]
    assert answers[3]["reward_extra_info"] == {"loads": 2.0, "loads/path": "here", "custom_reward_function": 3.0}


def test_one_that_fails_takes_the_whole_score_with_it(loads):
    scorers = [{"name": "loads"}, {"name": "custom_reward_function"}]
    answers = scored(Flaky({"prompt 0"}, math.inf).one, scorers=scorers)
    assert [math.isnan(a["reward_score"]) for a in answers] == [True, False, False, False]
