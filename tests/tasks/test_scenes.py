"""The task `scenes`: what is drawn is found, by GenEval's own rules, and what is held out stays so."""

import numpy as np
import pytest

from verl_omni.rewards.scorers.geneval.tasks import TAGS, read_task
from verl_omni.tasks import scenes
from verl_omni.tasks.shapes import pieces


def drawn(tasks, seed=0):
    return [picture.permute(1, 2, 0).numpy() for picture in scenes.draw_tasks(tasks, seed)]


@pytest.mark.parametrize("tag", TAGS)
def test_what_is_drawn_is_found(tag):
    tasks = list(scenes.all_tasks(tag))[::3][:60]
    answers = scenes.score(drawn(tasks), [str(row) for row in map(_json, tasks)])
    assert {(answer["correct"], answer["score"], answer["nothing_else"], answer["tag"]) for answer in answers} == {
        (1.0, 1.0, 1.0, tag)
    }


def _json(task):
    import json

    return json.dumps(scenes.metadata(task))


@pytest.mark.parametrize("tag", TAGS)
def test_what_was_asked_for_otherwise_is_wrong(tag):
    """The pictures of other prompts of the same task: hardly any is right by chance."""
    tasks = [task for task in scenes.all_tasks(tag)][:60]
    others = tasks[len(tasks) // 2 :] + tasks[: len(tasks) // 2]
    verdicts = [scenes.look(picture, task)[0] for picture, task in zip(drawn(tasks), others, strict=True)]
    assert np.mean([verdict.correct for verdict in verdicts]) < 0.25


def test_an_object_more_is_seen_by_the_second_reward_alone():
    """GenEval asks for the objects of a prompt, and lets others pass."""
    (two,) = [task for task in scenes.all_tasks("two_object") if [w.name for w in task.include] == ["circle", "star"]]
    single = read_task({"tag": "single_object", "include": [{"class": "circle", "count": 1}]}, None)
    (picture,) = drawn([two])
    (answer,) = scenes.score([picture], [_json(single)])
    assert (answer["correct"], answer["nothing_else"]) == (1.0, 0.0)


def test_noise_scores_nothing():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    tasks = [next(scenes.all_tasks(tag)) for tag in TAGS]
    assert not any(scenes.look(noise, task)[0].correct for task in tasks)


def test_nothing_that_is_held_out_is_trained_on():
    train, held_out = scenes.split_tasks()
    for tag in TAGS:
        assert train[tag] and held_out[tag]
        assert not {scenes.meaning(t) for t in train[tag]} & {scenes.meaning(t) for t in held_out[tag]}
    words = {scenes.prompt_of(task) for tasks in held_out.values() for task in tasks}
    _, asked = scenes.training_pictures(300, 0, "cpu")
    assert not words & {*(prompt for prompt, _ in asked), *(row["prompt"] for row in scenes.rows("train"))}
    assert words >= {row["prompt"] for row in scenes.rows("val")}


def test_the_same_picture_in_other_words_is_the_same_meaning():
    by_prompt = {scenes.prompt_of(task): scenes.meaning(task) for task in scenes.all_tasks("position")}
    assert by_prompt["a photo of a star left of a ring"] == by_prompt["a photo of a ring right of a star"]
    assert by_prompt["a photo of a star left of a ring"] != by_prompt["a photo of a ring left of a star"]


def test_prompts_are_in_genevals_words():
    prompts = {scenes.prompt_of(task) for tag in TAGS for task in scenes.all_tasks(tag)}
    assert {"a photo of three crosses", "a photo of an orange heart", "a photo of a star above a ring"} <= prompts


def test_each_task_counts_the_same():
    for split in ("train", "val"):
        tags = [read_task(None, row["reward_model"]["ground_truth"]).tag for row in scenes.rows(split)]
        assert len({tags.count(tag) for tag in TAGS}) == 1


def test_pieces_are_what_a_walk_finds():
    mask = np.random.default_rng(1).random((24, 31)) < 0.55
    left, walked = {tuple(place) for place in np.argwhere(mask)}, set()
    while left:
        todo, piece = [left.pop()], set()
        while todo:
            y, x = todo.pop()
            piece.add((int(y), int(x)))
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            todo += near
        walked.add(frozenset(piece))
    assert {frozenset(zip(rows.tolist(), columns.tolist(), strict=True)) for rows, columns in pieces(mask)} == walked
