"""Reward functions of every shape, and every way in which one can fail: one clear line, never a 0."""

import asyncio
import re
import threading

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto

from verl_omni.rewards import check_settings, make_scorer
from verl_omni.rewards.image_manager import ImageRewardManager
from verl_omni.rewards.registry import _REWARDS
from verl_omni.rewards.reward_function import BATCHED, SINGLE, RewardFunction
from verl_omni.rewards.reward_loop import load_custom_reward_function
from verl_omni.utils.masking import masked
from verl_omni.utils.responses import Video

CONFIG = OmegaConf.create({"reward": {"batch_size": 4, "on_failure": "stop"}})
OTHER_KINDS = {"audio", "sample_rate", "text", "video", "frame_rate", "latent"}
GUARD = 60  # seconds after which something waits for ever


def sample(i: int = 0, source: str = "mine", position=None, **image) -> DataProto:
    """One finished image: all its pixels are i."""
    pixels = image.get("pixels", torch.full((3, 4, 6), i, dtype=torch.uint8))
    rows = {
        "data_source": source,
        "prompt": f"prompt {i}",
        "reward_model": {"style": "rule", "ground_truth": f"truth {i}"},
        "extra_info": {"index": i},
    }
    data = DataProto.from_dict(
        tensors={"responses": pixels[None]},
        non_tensors={k: np.array([v], dtype=object) for k, v in rows.items()},
    )
    if position is not None:
        data.meta_info["position"] = position
    return data


def scores(function, rows: list[DataProto], **manager) -> list[dict]:
    async def run():
        made = ImageRewardManager(CONFIG, None, compute_score=function, **manager)
        return await asyncio.wait_for(asyncio.gather(*(made.run_single(row) for row in rows)), GUARD)

    return asyncio.run(run())


def message(function, rows: list[DataProto] | None = None) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        scores(function, rows or [sample(7)])
    text = str(caught.value)
    assert "\n" not in text
    return text


# ---- shapes --------------------------------------------------------------------------------------------


def single(ground_truth, extra_info):
    return {"score": extra_info["index"] / 2, "seen": ground_truth}


async def single_async(ground_truth, extra_info):
    await asyncio.sleep(0)
    return {"score": extra_info["index"] / 2, "seen": ground_truth}


def batched(images, ground_truths, extra_infos):
    return [{"score": e["index"] / 2, "seen": g} for e, g in zip(extra_infos, ground_truths, strict=True)]


async def batched_async(images, ground_truths, extra_infos):
    await asyncio.sleep(0)
    return batched(images, ground_truths, extra_infos)


class AsyncCall:
    async def __call__(self, ground_truth, extra_info):
        return await single_async(ground_truth, extra_info)


@pytest.mark.parametrize("function", [single, single_async, batched, batched_async, AsyncCall()])
def test_one_or_many_sync_or_async(function):
    answers = scores(function, [sample(i) for i in range(10)])
    assert [a["reward_score"] for a in answers] == [i / 2 for i in range(10)]
    assert [a["reward_extra_info"] for a in answers] == [{"seen": f"truth {i}"} for i in range(10)]


@pytest.mark.parametrize(
    "value", [3, 3.0, True, np.float32(3), np.array([3.0]), torch.tensor(3.0), torch.tensor([3]), {"score": 3}]
)
def test_numbers_of_any_kind(value):
    (answer,) = scores(lambda prompt: value, [sample()])
    assert answer == {"reward_score": float(np.asarray(getattr(value, "get", lambda _: value)("score")).item()),
                      "reward_extra_info": {}}  # fmt: skip
    assert isinstance(answer["reward_score"], float)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_batches_of_any_kind(kind):
    function = lambda images: kind([float(len(images))] * len(images))  # noqa: E731
    assert {a["reward_score"] for a in scores(function, [sample(i) for i in range(4)])} == {4.0}


def test_every_parameter_by_its_name():
    seen = {}

    def one(data_source, solution_image, image, prompt, ground_truth, extra_info, weight, reward_router_address):
        seen.update(locals())
        return weight

    function = RewardFunction(one, "one", {"weight": 0.25})
    (answer,) = scores(function, [sample(51)], reward_router_address="host:1")
    assert answer["reward_score"] == 0.25
    assert (seen["data_source"], seen["prompt"], seen["ground_truth"]) == ("mine", "prompt 51", "truth 51")
    assert seen["extra_info"] == {"index": 51, "prompt": "prompt 51"}
    assert torch.equal(seen["solution_image"], torch.full((3, 4, 6), 0.2))
    assert seen["image"].size == (6, 4) and seen["image"].getpixel((0, 0)) == (51, 51, 51)
    assert seen["reward_router_address"] == "host:1"
    assert set(SINGLE) - OTHER_KINDS - {"other"} <= set(seen)  # of a comparison: test_pairwise.py


def test_every_plural_parameter_by_its_name():
    seen = {}

    def many(data_sources, solution_images, images, prompts, ground_truths, extra_infos):
        seen.update(locals())
        return [0.5] * len(images)

    scores(many, [sample(i, position=(i, 3)) for i in range(3)])
    assert set(BATCHED) - {f"{name}s" for name in (*OTHER_KINDS, "other")} <= set(seen)
    assert seen["prompts"] == ["prompt 0", "prompt 1", "prompt 2"]
    assert seen["ground_truths"] == ["truth 0", "truth 1", "truth 2"]
    assert [e["index"] for e in seen["extra_infos"]] == [0, 1, 2]
    assert [i.getpixel((0, 0))[0] for i in seen["images"]] == [0, 1, 2]
    assert seen["data_sources"] == ["mine"] * 3 and seen["solution_images"][2].shape == (3, 4, 6)


def test_a_video_is_a_list_of_frames():
    seen = {}

    def frames(image, solution_image):
        seen.update(image=image, tensor=solution_image)
        return 1.0

    scores(frames, [sample(pixels=torch.zeros(5, 3, 4, 6, dtype=torch.uint8))])
    assert [frame.size for frame in seen["image"]] == [(6, 4)] * 5 and seen["tensor"].shape == (5, 3, 4, 6)


def test_a_video_says_how_fast_it_is():
    """8 frames a second, as its file has, where the model that made it does not say."""
    seen = []

    def fast(videos, frame_rates):
        seen.extend(zip((len(video) for video in videos), frame_rates, strict=True))
        return [1.0] * len(videos)

    pixels = torch.zeros(5, 3, 4, 6, dtype=torch.uint8)
    asyncio.run(RewardFunction(fast, "fast").score([{"response": one} for one in (pixels, Video(pixels[:2], 24.0))]))
    assert seen == [(5, 8.0), (2, 24.0)]


# ---- batches -------------------------------------------------------------------------------------------


def test_batches_are_of_one_source_and_mixed_sources_do_not_wait_for_each_other():
    """A burst of seven images of two sources, in any order of arrival."""
    sizes = []

    def many(data_sources, prompts):
        assert len(set(data_sources)) == 1
        sizes.append((data_sources[0], tuple(prompts)))
        return [float(p.split()[1]) for p in prompts]

    rows = [sample(i, "a", (i, 5)) for i in range(5)] + [sample(10 + i, "b", (i, 2)) for i in range(2)]
    answers = scores(many, rows[::-1])
    assert [a["reward_score"] for a in answers] == [11, 10, 4, 3, 2, 1, 0]
    assert sorted(sizes) == [
        ("a", ("prompt 0", "prompt 1", "prompt 2", "prompt 3")),
        ("a", ("prompt 4",)),
        ("b", ("prompt 10", "prompt 11")),
    ]


def test_the_reward_of_each_data_source(monkeypatch):
    _REWARDS.names()
    monkeypatch.setattr(_REWARDS, "_entries", dict(_REWARDS._entries))
    _REWARDS.add("twice", lambda images, **rest: [{"score": 2.0}] * len(images))
    _REWARDS.add("thrice", lambda images, **rest: [{"score": 3.0, "why": "b"}] * len(images))
    rows = [sample(i, ("twice", "thrice")[i % 2], (i // 2, 3)) for i in range(6)]
    answers = scores(None, rows)
    assert [a["reward_score"] for a in answers] == [2.0, 3.0] * 3
    assert answers[1]["reward_extra_info"] == {"why": "b"}


def test_a_data_sources_reward_gets_its_settings(monkeypatch):
    def weigh(images, *_, level: float = 1.0):
        return [{"score": level}] * len(images)

    _REWARDS.names()  # all that is built in is there before the copy
    monkeypatch.setattr(_REWARDS, "_entries", dict(_REWARDS._entries))
    _REWARDS.add("weigh", weigh)
    monkeypatch.setitem(CONFIG.reward, "scorers", {"weigh": {"level": 0.25}, "other": {"level": 3}})
    (answer,) = scores(None, [sample(source="weigh")])
    assert answer["reward_score"] == 0.25


def test_sync_functions_run_beside_the_event_loop():
    """A slow function must not keep finished images of others from being scored."""
    entered, leave = threading.Event(), threading.Event()

    def slow_first(prompt):
        if prompt == "prompt 0":
            entered.set()
            assert leave.wait(GUARD)
        else:
            assert entered.wait(GUARD)
            leave.set()
        return 1.0

    assert len(scores(slow_first, [sample(0), sample(1)])) == 2


# ---- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 10**400, "0.5", {}, {"score": None},
                                   {"reward": 1}, torch.tensor([1.0, 2.0]), np.zeros(3), [1.0]])  # fmt: skip
@pytest.mark.parametrize("many", [False, True], ids=["single", "batched"])
def test_what_is_no_number_is_an_error(value, many):
    if many:

        def broken(images):
            return [value for _ in images]
    else:

        def broken(image):
            return value

    text = message(broken)
    assert "reward function broken returned" in text and "expected a finite number" in text and "prompt 7" in text


@pytest.mark.parametrize(
    ("value", "said"), [([1.0], "returned 1 for 3 images"), (None, "returned NoneType for 3"), (1.0, "returned float")]
)
def test_a_wrong_count_is_an_error(value, said):
    text = message(lambda images: value, [sample(i, position=(i, 3)) for i in range(3)])
    assert said in text and "one score" in text


@pytest.mark.parametrize("shape", ["def f(image):", "async def f(image):", "def f(images):", "async def f(images):"])
def test_an_exception_names_function_error_and_prompt(shape, tmp_path):
    (tmp_path / "mine.py").write_text(f"{shape}\n    raise KeyError('no such word')\n")
    text = message(RewardFunction.load(str(tmp_path / "mine.py"), "f"))
    assert f"reward function f ({tmp_path / 'mine.py'}) raised KeyError: 'no such word'" in text and "prompt 7" in text


def test_a_failed_batch_is_tried_again_image_by_image():
    def many(images, prompts):
        if "prompt 0" in prompts:
            raise OSError("gone")
        return [1.0] * len(images)

    async def run():
        manager = ImageRewardManager(CONFIG, None, compute_score=many)
        rows = [sample(i, position=(i, 8)) for i in range(8)]
        return await asyncio.gather(*(manager.run_single(row) for row in rows), return_exceptions=True)

    answers = asyncio.run(run())
    assert "raised OSError: gone" in str(answers[0])
    assert [a["reward_score"] for a in answers[1:]] == [1.0] * 7


def refused(path, name="compute_score", kwargs=None) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        RewardFunction.load(str(path), name, kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_called_is_refused_before_the_start(tmp_path):
    path = tmp_path / "mine.py"
    assert f'reward.custom_reward_function.path="{path}"' in refused(path) and "no such file" in refused(path)
    path.write_text("def compute_scores(image):\n    return 1.0\nlimit = 3\n")
    text = refused(path)
    assert "reward.custom_reward_function.name" in text and 'did you mean "compute_scores"' in text
    assert "compute_scores" in refused(path, "limit")
    path.write_text("def compute_score(imge):\n    return 1.0\n")
    assert re.search(r'unknown parameter "imge": did you mean "image"', refused(path))
    path.write_text("def compute_score(images, prompt):\n    return [1.0]\n")
    assert 'did you mean "prompts"' in refused(path)
    path.write_text("def compute_score(image, weight=1.0):\n    return 1.0\n")
    assert 'did you mean "weight"' in refused(path, kwargs={"wieght": 2.0})
    assert "reward_kwargs.image would hide" in refused(path, kwargs={"image": 2.0})
    path.write_text("import not_there\n")
    assert "cannot be imported: ModuleNotFoundError: No module named 'not_there'" in refused(path)


def test_a_source_without_a_reward_is_an_error():
    with pytest.raises(ValueError, match='unknown reward .data_source. "jpeg_compresibility".*jpeg_compressibility'):
        scores(None, [sample(source="jpeg_compresibility")])


def test_a_secret_reaches_the_function_and_no_file(tmp_path, monkeypatch):
    """`env:` and `file:` are looked up where the function is called; the configuration keeps the reference."""
    monkeypatch.setenv("MY_TOKEN", "from the environment")
    (tmp_path / "key").write_text("from a file\n")
    source = "def compute_score(image, auth, key):\n    return {'score': 1, 'told': [auth, key]}\n"
    (tmp_path / "mine.py").write_text(source)
    kwargs = {"auth": {"bearer": "env:MY_TOKEN"}, "key": f"file:{tmp_path}/key"}
    custom = {"path": str(tmp_path / "mine.py"), "name": "compute_score", "reward_kwargs": kwargs}
    config = OmegaConf.create({"custom_reward_function": custom, "timeout": 60.0})
    (told,) = scores(load_custom_reward_function(config), [sample()])
    assert told["reward_extra_info"]["told"] == [{"bearer": "from the environment"}, "from a file"]
    assert masked(OmegaConf.to_container(config))["custom_reward_function"]["reward_kwargs"] == kwargs
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(ValueError, match="reward_kwargs.auth.bearer=env:MY_TOKEN: there is no environment variable"):
        load_custom_reward_function(config)


def test_a_secret_of_a_registered_reward(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("from a file\n")
    seen = []

    def with_key(images, *, api_key: str = ""):
        seen.append(api_key)
        return [1.0] * len(images)

    _REWARDS.names()
    monkeypatch.setattr(_REWARDS, "_entries", dict(_REWARDS._entries))
    _REWARDS.add("with_key", with_key)
    settings = {"api_key": f"file:{tmp_path}/key"}
    check_settings("with_key", settings)
    make_scorer("with_key", settings)(images=[None])
    assert seen == ["from a file"]
    with pytest.raises(ValueError, match="reward.scorers.with_key.api_key=file:/no/key: /no/key is missing"):
        check_settings("with_key", {"api_key": "file:/no/key"})
