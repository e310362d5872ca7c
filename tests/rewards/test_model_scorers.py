"""Rewards with a model: what is told of one that is not there, of another one, and of settings."""

import asyncio
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_scorers import clip_folder, pictures

from verl_omni.rewards import check_settings, make_scorer
from verl_omni.rewards.choice import Choice
from verl_omni.rewards.images import pictures_of
from verl_omni.rewards.scoring import as_reward_function
from verl_omni.utils.errors import RunError


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    return folder, clip_folder(folder)


def said(name: str, **settings) -> str:
    with pytest.raises(RunError) as error:
        make_scorer(name, settings)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["clip_score", "siglip_score", "pickscore", "hpsv2", "aesthetic", "image_reward"])
def test_without_the_model_one_line_says_what_to_set(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for settings in ({}, {"model": "/no/such/place"}, {"model": "nobody/nothing"}):
        told = said(name, **settings)
        assert f'the reward "{name}" cannot load' in told and f"set reward.scorers.{name}.model to" in told
        assert "cannot load" in told and settings.get("model", "") in told


def test_the_other_part_of_a_model_is_named_too(clip, tmp_path):
    told = said("pickscore", model=str(clip[0]), processor="nobody/nothing")
    assert 'reward.scorers.pickscore.processor="nobody/nothing"' in told


def test_a_folder_without_all_weights_is_no_model(tmp_path):
    clip_folder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    told = "is another model: it lacks, or has in another shape, visual_projection.weight"
    assert told in said("clip_score", model=str(tmp_path))
    weights["visual_projection.weight"] = torch.ones(3, 3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert told in said("clip_score", model=str(tmp_path))


def test_a_folder_that_would_run_something_is_not_loaded(tmp_path):
    clip_folder(tmp_path)
    config = tmp_path / "config.json"
    whole = config.read_text()
    config.write_text(json.dumps(json.loads(whole) | {"auto_map": {"AutoModel": "mine.Mine"}}))
    assert f'{config} has "auto_map"' in said("clip_score", model=str(tmp_path))
    config.write_text(whole)
    (tmp_path / "mine.py").write_text("")  # which nothing names
    make_scorer("clip_score", {"model": str(tmp_path)})
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert "safetensors" in said("clip_score", model=str(tmp_path))


def test_a_device_that_is_not_there(clip):
    assert said("clip_score", model=str(clip[0]), device="gpu").startswith("reward.scorers.clip_score.device=gpu:")
    assert "sees 0 GPUs" in said("clip_score", model=str(clip[0]), device="cuda:1")


def test_prompts_have_to_be_there(clip):
    scorer = make_scorer("clip_score", {"model": str(clip[0])})
    for prompts, told in ((None, "got none"), (["a"], "3 images, and got 1"), (["a", " ", "b"], "image 1 is ' '")):
        with pytest.raises(ValueError, match=told):
            scorer(pictures(), None, prompts, None)
    with pytest.raises(ValueError, match="image 0 is None"):
        scorer(pictures()[:1], None, [None], None)


def test_settings_are_checked_before_a_run():
    check_settings("clip_score", {"frames": 4, "dtype": "bfloat16", "device": None, "scale": "paper"})
    check_settings("pickscore", {"divide_by": 26})
    for name, settings, told in (
        ("clip_score", {"frames": 0}, "frames=0: expected 1 or more"),
        ("clip_score", {"dtype": "fp16"}, 'unknown reward.scorers.clip_score.dtype "fp16": known: bfloat16, float16'),
        ("pickscore", {"divide_by": 0}, "divide_by=0: expected above 0"),
        ("siglip_score", {"scale": "cosin"}, 'did you mean "cosine"'),
        ("hpsv2", {"batch_size": 0}, "batch_size=0: expected 1 or more"),
    ):
        with pytest.raises(ValueError) as error:
            check_settings(name, settings)
        assert told in str(error.value)


def test_frames_are_spread_evenly():
    video = [pictures((4, 4), seed=number)[0] for number in range(10)]

    def chosen(count):
        found = pictures_of(video, count)
        return [[frame.tobytes() for frame in video].index(frame.tobytes()) for frame in found]

    assert chosen(None) == chosen(10) == chosen(99) == list(range(10))
    assert chosen(1) == [5] and chosen(2) == [2, 7] and chosen(5) == [1, 3, 5, 7, 9]
    assert len(pictures_of(video[0], 3)) == len(pictures_of(video[0])) == 1
    assert pictures_of(video[0].convert("L"))[0].mode == "RGB"
    with pytest.raises(ValueError, match="a video has no frames"):
        pictures_of([])


def test_the_reward_loop_scores_with_it(clip):
    """As a run does: tensors, one batch, the model loaded by the first call."""
    function = as_reward_function(None, Choice("clip_score", "clip_score", settings={"model": str(clip[0])}))
    pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 for image in pictures((40, 40), (40, 40))]
    samples = [
        {"data_source": "clip_score", "response": pixels[0], "prompt": "a fox"},
        {"data_source": "clip_score", "response": torch.stack(pixels), "prompt": "a fox"},
    ]
    image, video = asyncio.run(function.score(samples))
    scorer = make_scorer("clip_score", {"model": str(clip[0])})
    alone = scorer(pictures((40, 40), (40, 40)), None, ["a fox"] * 2, None)
    assert image == pytest.approx(alone[0], abs=1e-5)
    assert video["score"] == pytest.approx((alone[0]["score"] + alone[1]["score"]) / 2, abs=1e-5)
