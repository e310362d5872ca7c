"""`reward.pairwise`: the share of comparisons with others of its prompt that an image wins."""

import asyncio
import math

import pytest
import torch
from e2e_runs import back_to, metrics, run_here, settings
from verl.protocol import DataProto

from verl_omni.agent_loop.manager import assign
from verl_omni.rewards.pairwise import Comparisons, beside, pairs
from verl_omni.rewards.reward_function import RewardError, RewardFunction
from verl_omni.rewards.scoring import Scoring
from verl_omni.testing.local_trainer import local_config
from verl_omni.utils.arrays import object_array
from verl_omni.utils.responses import Video

NAN = math.nan


def shares(by: str, values: list[float], ask, opponents=None, order=None) -> list[dict]:
    """Of images that are but numbers, which come in the given order."""

    async def run() -> list[dict]:
        comparisons = Comparisons(by, opponents, ask)
        places = order or range(len(values))
        calls = {i: comparisons.share("g", (i, len(values)), {"response": values[i]}) for i in places}
        found = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
        return [found[i] for i in range(len(values))]

    return asyncio.run(run())


async def score_of(sample: dict) -> dict:
    value = sample["response"]
    failure = {"reward_failure": "it broke"} if math.isnan(value) else {}
    return {"reward_score": value, "reward_extra_info": {"told": value}, **failure}


async def better_of(sample: dict) -> dict:
    one, other = sample["response"], sample["other"]
    if one + other == 7:
        return {"reward_score": NAN, "reward_extra_info": {}, "reward_failure": "cannot tell"}
    return {"reward_score": 0.5 if one == other else float(one > other), "reward_extra_info": {}}


@pytest.mark.parametrize("order", [None, [3, 0, 2, 1]])
@pytest.mark.parametrize(("by", "ask"), [("score", score_of), ("pair", better_of)])
def test_all_pairs(by, ask, order):
    found = shares(by, [0.1, 0.9, 0.5, 0.5], ask, order=order)
    assert [answer["reward_score"] for answer in found] == pytest.approx([0, 1, 0.5, 0.5])
    assert [answer["reward_extra_info"]["comparisons"] for answer in found] == [3] * 4
    if by == "score":
        assert found[1]["reward_extra_info"]["score_alone"] == found[1]["reward_extra_info"]["told"] == 0.9


def test_rates_of_a_group_are_one_half_on_average():
    found = shares("pair", [0.3, 0.2, 0.8, 0.6, 0.1], better_of)
    assert sum(answer["reward_score"] for answer in found) / 5 == pytest.approx(0.5)


def test_an_image_without_a_score_leaves_its_group():
    found = shares("score", [0.1, NAN, 0.5], score_of)
    assert [found[0]["reward_score"], found[2]["reward_score"]] == [0, 1] and found[1]["reward_failure"] == "it broke"
    alone = shares("score", [NAN, 0.5, NAN], score_of)
    assert all(math.isnan(answer["reward_score"]) and answer["reward_failure"] for answer in alone)


def test_a_comparison_that_fails_is_none():
    """3 and 4 cannot be told apart: each has one comparison less. Where none is left there is no score, never a 0."""
    found = shares("pair", [3.0, 4.0, 1.0], better_of)
    assert [answer["reward_score"] for answer in found] == [1, 1, 0]
    assert [answer["reward_extra_info"]["comparisons"] for answer in found] == [1, 1, 2]
    none = shares("pair", [3.0, 4.0], better_of)
    assert all(math.isnan(answer["reward_score"]) and answer["reward_failure"] == "cannot tell" for answer in none)


def test_an_answer_that_is_no_share_ends_the_run():
    async def ten(sample: dict) -> dict:
        return {"reward_score": 10.0, "reward_extra_info": {}}

    with pytest.raises(RewardError, match="the reward said 10 of two images; expected 1 where the first is the better"):
        shares("pair", [0.0, 1.0], ten)


@pytest.mark.parametrize("opponents", [1, 3, None])
def test_who_is_compared_with_whom_depends_on_the_group_alone(opponents):
    found = pairs(range(8), opponents, "3-1")
    assert found == pairs(range(8), opponents, "3-1") != pairs(range(8), opponents, "3-2")
    assert len({tuple(sorted(pair)) for pair in found}) == len(found)  # each two once
    met = [sum(i in pair for pair in found) for i in range(8)]
    assert min(met) >= (opponents or 7) and (opponents is not None or len(found) == 28)
    assert 0 < sum(i < j for i, j in found) < len(found)  # nobody is always first


def test_two_images_as_one_picture():
    one, other = torch.zeros(3, 4, 5), torch.full((3, 4, 5), 0.5)
    both = beside(one, other)
    assert both.shape == (3, 4, 18) and torch.equal(both[..., :5], one) and torch.equal(both[..., 13:], other)
    video = beside(Video(one[None], 16.0), Video(other[None], 16.0))
    assert torch.equal(video.frames, both[None]) and video.frame_rate == 16


def test_a_group_meets_in_one_process():
    rows = {"uid": object_array(list("aabbcc")), "data_source": object_array(["x"] * 6)}
    batch = DataProto.from_dict({"x": torch.zeros(6)}, rows, meta_info={"compares": True})
    assign(batch, 1, 2, 4)
    assert list(batch.non_tensor_batch["reward_worker"]) == [0, 0, 1, 1, 0, 0]
    assert list(batch.non_tensor_batch["compared"]) == [(0, 2), (1, 2)] * 3


def test_a_group_is_scored_at_once_in_the_order_of_its_places():
    asked = []

    async def apart(samples: list[dict]) -> list[dict]:
        """How far each is from the nearest other one: what nobody can tell of an image alone."""
        values = [sample["response"] for sample in samples]
        asked.append(values)
        near = [min(abs(v - w) for j, w in enumerate(values) if j != i) for i, v in enumerate(values)]
        return [{"reward_score": value, "reward_extra_info": {}} for value in near]

    async def run() -> list[dict]:
        comparisons = Comparisons("group", None, score_of, apart)
        values, order = [1.0, 2.0, 4.0, 8.0], [3, 0, 2, 1]
        calls = {i: comparisons.share("g", (i, 4), {"response": values[i]}) for i in order}
        found = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
        return [found[i]["reward_score"] for i in range(4)]

    assert asyncio.run(run()) == [1, 1, 2, 4] and asked == [[1.0, 2.0, 4.0, 8.0]]


def test_a_group_whose_call_fails_is_asked_again_whole():
    calls = []

    def sometimes(images, prompts):
        calls.append(len(images))
        if len(calls) < 3:
            raise ValueError("not yet")
        return [0.5] * len(images)

    async def run(retries: int):
        samples = [{"response": torch.zeros(3, 2, 2), "prompt": "a"}] * 5
        return await Scoring(RewardFunction(sometimes, "mine"), batch_size=2, retries=retries).score_group(samples)

    assert [answer["score"] for answer in asyncio.run(run(2))] == [0.5] * 5 and calls == [5, 5, 5]
    calls.clear()
    assert "raised ValueError: not yet" in str(asyncio.run(run(1)))


BRIGHT = "sum(image.convert('L').resize((2, 2)).getdata())"
SCORE = f"def compute_score(image):\n    return {BRIGHT}\n"
PAIR = f"""
def bright(image):
    return {BRIGHT}

def compute_score(image, other, prompt):
    assert prompt and image.size == other.size == (32, 32)
    return 0.5 if bright(image) == bright(other) else float(bright(image) > bright(other))
"""
BESIDE = f"""
def compute_score(image):
    assert image.size == (72, 32)
    left, right = ({BRIGHT.replace("image.", "image.crop(box).")} for box in ((0, 0, 32, 32), (40, 0, 72, 32)))
    return 0.5 if left == right else float(left > right)
"""


def test_in_a_run_all_ways_give_the_same_rates(tmp_path, monkeypatch, process_group):
    """The same judgement as a score, as a comparison, and of a picture with both: the same numbers, bit for bit."""
    told = {}
    for name, by, reward in (("score", "score", SCORE), ("pair", "pair", PAIR), ("beside", "pair", BESIDE)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "reward.py").write_text(reward)
        arguments = settings(
            folder / "run", "reward.custom_reward_function.path=reward.py", f"reward.pairwise.by={by}",
            "data.val_files=null", "trainer.total_training_steps=1", "trainer.save_freq=0",
            "actor_rollout_ref.rollout.pipeline.num_inference_steps=2",
        )  # fmt: skip
        run_here(arguments, folder, monkeypatch)
        told[name] = metrics(folder / "run")[1]
    assert told["pair"] == told["beside"]
    same = [key for key in told["pair"] if not key.startswith("reward/")]
    assert {k: told["score"][k] for k in same} == {k: told["pair"][k] for k in same}
    assert told["pair"]["critic/rewards/mean"] == pytest.approx(0.5) and told["pair"]["critic/rewards/std_mean"] > 0
    assert told["pair"]["actor/grad_norm"] > 0


def compared(folder, name: str, by: str, *overrides: str) -> list[str]:
    (folder / f"{by}.py").write_text({"score": SCORE, "pair": PAIR, "group": RANKS}[by])
    return settings(
        folder / name, f"reward.custom_reward_function.path={by}.py", f"reward.pairwise.by={by}", "data.val_files=null",
        "actor_rollout_ref.rollout.pipeline.num_inference_steps=2", "actor_rollout_ref.actor.optim.lr=0.01",
        "trainer.total_training_steps=2", "trainer.save_freq=0", "reward.batch_size=3", *overrides,
    )  # fmt: skip


@pytest.mark.parametrize("by", ["score", "pair", "group"])
def test_a_run_goes_on_bit_for_bit(tmp_path, monkeypatch, process_group, by):
    """Who meets whom is that of the step, not of how many were compared before it."""
    few = [] if by == "group" else ["reward.pairwise.opponents=1"]
    arguments = compared(tmp_path, "run", by, *few, "trainer.save_freq=1")
    run_here(arguments, tmp_path, monkeypatch)
    straight = metrics(tmp_path / "run")
    back_to(1, tmp_path / "run")
    run_here(arguments, tmp_path, monkeypatch)
    assert metrics(tmp_path / "run") == straight and straight[2]["critic/rewards/std_mean"] > 0


@pytest.mark.parametrize(("by", "mode"), [("score", "separate"), ("pair", "one_step_off"), ("group", "fully_async")])
def test_images_are_compared_in_other_modes(tmp_path, monkeypatch, process_group, by, mode):
    """With those of their own prompt: servers in turn with training give the same numbers, and those that run ahead
    the same first step. Where they draw on and on, other images are in a forward, and round otherwise."""
    ahead = [] if mode == "separate" else ["trainer.max_staleness=1"]
    run_here(compared(tmp_path, "run", by), tmp_path, monkeypatch)
    run_here(compared(tmp_path, mode, by, f"trainer.mode={mode}", *ahead), tmp_path, monkeypatch)
    own, found = metrics(tmp_path / "run"), metrics(tmp_path / mode)
    assert found[2]["staleness/max"] == len(ahead) and found[2]["critic/rewards/mean"] == pytest.approx(0.5)
    for step in (1,) if ahead else (1, 2):
        same = {key: found[step][key] for key in own[step]}
        assert same == (own[step] if mode != "fully_async" else pytest.approx(own[step], rel=1e-5, abs=1e-6))


def test_a_function_of_single_images_cannot_see_a_group(tmp_path):
    (tmp_path / "reward.py").write_text(SCORE)
    group = ("reward.pairwise.by=group", "data.val_files=null")
    for own in (f"reward.custom_reward_function.path={tmp_path}/reward.py", "reward.scorers=[{name: ocr}]"):
        with pytest.raises(ValueError, match="by=group shows a function of yours .* that takes `images`"):
            local_config(settings(tmp_path / "run", own, *group))


RANKS = f"""
def compute_score(images, prompts):
    assert len(images) == 4 and len(set(prompts)) == 1, "one prompt's"
    bright = [{BRIGHT.replace("image.", "one.")} for one in images]
    return [(sum((b > c) + 0.5 * (b == c) for c in bright) - 0.5) / 3 for b in bright]
"""


def test_in_a_run_a_function_sees_whole_groups(tmp_path, monkeypatch, process_group):
    """What it says of a group's ranks is what a win rate by pairs would be."""
    told = {}
    for name, reward in (("group", RANKS), ("pair", PAIR)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "reward.py").write_text(reward)
        arguments = settings(
            folder / "run", "reward.custom_reward_function.path=reward.py", f"reward.pairwise.by={name}",
            "data.val_files=null", "trainer.total_training_steps=1", "trainer.save_freq=0", "reward.batch_size=3",
            "actor_rollout_ref.rollout.pipeline.num_inference_steps=2",
        )  # fmt: skip
        run_here(arguments, folder, monkeypatch)
        told[name] = metrics(folder / "run")[1]
    assert told["group"]["critic/rewards/std_mean"] == pytest.approx(told["pair"]["critic/rewards/std_mean"], rel=1e-5)
    assert told["group"]["actor/grad_norm"] == pytest.approx(told["pair"]["actor/grad_norm"], rel=1e-3)
