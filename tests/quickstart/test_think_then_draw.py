"""Numbers in words, a language model that mostly repeats them, and the recipe in which it learns to write digits."""

import dataclasses
import json

import pyarrow.parquet as pq
import pytest
from e2e_runs import metrics

from benchmarks import task_runs, think_then_draw
from verl_omni.quickstart import task
from verl_omni.quickstart.__main__ import training_command
from verl_omni.quickstart.language_model import Recipe, build_language_model, written
from verl_omni.quickstart.made import RECIPE


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (7, "seven"),
        (13, "thirteen"),
        (20, "twenty"),
        (42, "forty two"),
        (300, "three hundred"),
        (305, "three hundred and five"),
        (999, "nine hundred and ninety nine"),
    ],
)
def test_numbers_in_words(number, words):
    assert task.in_words(number) == words
    assert task.words_prompt(f"{number:03d}") == f'a sign that reads "{words}"'


def test_the_shipped_model_mostly_repeats_and_was_made_as_it_says():
    assert json.loads((task.LANGUAGE_MODEL / RECIPE).read_text()) == dataclasses.asdict(Recipe())
    numbers = task.split_numbers()[1][:8]
    texts = written(task.LANGUAGE_MODEL, numbers)
    assert sum(text == task.words_prompt(number) for text, number in zip(texts, numbers, strict=True)) >= 4


def test_a_model_is_made_anew(tmp_path):
    folder = build_language_model(tmp_path / "model", dataclasses.replace(Recipe(), steps=1, batch=2))
    assert len(written(folder, ["305"])) == 1
    with pytest.raises(FileExistsError, match="choose another folder"):
        build_language_model(folder)


def test_the_command_has_prompts_in_words_and_the_language_model(tmp_path):
    command = training_command(tmp_path, tmp_path / "run", [], "think_then_draw")
    assert f"actor_rollout_ref.rewriter.path={task.LANGUAGE_MODEL}" in command
    rows = pq.read_table(tmp_path / "words/val.parquet").to_pylist()
    first = task.split_numbers()[1][0]
    assert rows[0]["prompt"][0]["content"] == task.words_prompt(first)
    assert rows[0]["reward_model"]["ground_truth"] == first


def test_a_step_of_the_recipe(tmp_path, process_group):
    pytest.importorskip("rapidocr")
    few = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1", "data.val_max_samples=4"]
    own = [*think_then_draw.RUNS["both"], *task_runs.settings(0, 1), *few, "actor_rollout_ref.rollout.n=4"]
    task_runs.run_one(think_then_draw.TASK, tmp_path / "run", own)
    told = metrics(tmp_path / "run")[1]
    assert told["actor/rewriter/first_ratio_max_dev"] < 1e-5 and told["actor/first_ratio_max_dev"] < 1e-6
    assert set(task_runs.curve(tmp_path / "run")) == {0, 1}
    sample = json.loads((tmp_path / "run/validation/step_0/samples.jsonl").read_text().splitlines()[0])
    assert sample["written"].startswith('a sign that reads "')
