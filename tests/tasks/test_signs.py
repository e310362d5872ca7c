"""The task `signs`: scenes that the OCR reads as they are, with words that are held out."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks.learning import settings
from verl_omni.tasks import find_task, signs, words
from verl_omni.tasks.generator import SMALL, make_generator
from verl_omni.testing.local_trainer import local_config


def test_the_ocr_reads_whole_scenes():
    pytest.importorskip("rapidocr")
    rng, asked = np.random.default_rng(0), signs.asked_for("val")[:6]
    answers = signs.score([signs.draw_scene(*one, rng) for one in asked], [" ".join(words) for words, _ in asked])
    assert np.mean([answer["exact"] for answer in answers]) > 0.8
    others = signs.score([signs.draw_scene(*asked[0], rng)], [" ".join(asked[1][0])])
    assert others[0]["score"] < 0.5


def test_one_to_three_words_of_which_none_is_in_both_halves():
    train, held_out = words.split_words()
    for split, known in (("train", train), ("val", held_out)):
        asked = signs.asked_for(split)[:60]
        assert {len(one) for one, _ in asked} == {1, 2, 3} and {word for one, _ in asked for word in one} <= {*known}
        assert all(len(set(one)) == len(one) for one, _ in asked)
    pictures, told = signs.training_pictures(30, 0, "cpu")
    assert pictures.shape == (30, 3, 128, 128) and signs.prompt_of(("A", "B"), "sky") == (
        'a sky with 2 signs that read "A" and "B"'
    )
    assert {truth.count(" ") for _, truth in told} == {0, 1, 2}
    assert not {*held_out} & {word for _, truth in told for word in truth.split()}


def test_a_tiny_one_is_made_and_its_recipe_is_right(tmp_path):
    size = dataclasses.replace(SMALL, pictures=12, vae_steps=2, steps=1, score_pictures=2)
    make_generator(find_task("signs"), tmp_path / "model", size, seconds=60, target=0.6)
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in signs.rows(split)[:8]))
    config = local_config(settings("signs", tmp_path, "flow_grpo", 0, 5e-5, []))
    assert config.actor_rollout_ref.rollout.pipeline.height == 128
