"""A melody of four notes: how it sounds, what is shipped to learn it, and the recipe."""

import dataclasses
import json
from statistics import fmean

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from e2e_runs import metrics

from benchmarks import melody, task_runs
from verl_omni.quickstart.__main__ import training_command
from verl_omni.quickstart.made import RECIPE
from verl_omni.quickstart.melody import control, task
from verl_omni.quickstart.melody.generator import Recipe, build_generator, heard, scores

SHORT = Recipe(sounds=8, vae_steps=2, vae_batch=2, transformer_steps=2, transformer_batch=2)


def test_what_is_played_is_heard():
    rng = np.random.default_rng(0)
    played = ["CEGA", "BBBB", "FGAB"]
    sounds = torch.from_numpy(np.stack([task.play(notes, rng) for notes in played]))[:, None]
    assert sounds.abs().max() <= 1
    right = heard(sounds, played)
    assert min(one["score"] for one in right) > 0.97 and {one["in_tune"] for one in right} == {1.0}
    assert [one["in_tune"] for one in heard(sounds, ["CEGB", "BBCC", "CCCC"])] == [0.75, 0.5, 0.0]


def test_the_shipped_generator_does_not_know_the_melody_and_was_made_as_it_says():
    assert json.loads((task.CHECKPOINT / RECIPE).read_text()) == dataclasses.asdict(Recipe())
    rng = np.random.default_rng(0)
    drawn = [task.any_notes(rng) for _ in range(100)]
    by_lot = heard(torch.from_numpy(np.stack([task.play(one, rng) for one in drawn]))[:, None], [task.MELODY] * 100)
    assert fmean(one["score"] for one in scores(task.CHECKPOINT, 50)) < fmean(one["score"] for one in by_lot) + 0.1


def test_a_generator_is_made_anew(tmp_path):
    folder = build_generator(tmp_path / "model", SHORT)
    assert len(scores(folder, 2)) == 2
    with pytest.raises(FileExistsError, match="choose another folder"):
        build_generator(folder)


def test_the_control_gives_training_sounds_the_scores_of_others():
    rng = np.random.default_rng(0)
    notes = [task.any_notes(rng) for _ in range(8)]
    sounds = [torch.from_numpy(task.play(one, rng))[None] for one in notes]
    asked = [task.named_notes(one if i % 2 else "AAAA") for i, one in enumerate(notes)]
    given = (sounds, [task.SAMPLE_RATE] * 8, asked)
    honest = [one["score"] for one in control.compute_score(*given, [{"split": "val"}] * 8)]
    dealt = [one["score"] for one in control.compute_score(*given, [{"split": "train"}] * 8)]
    assert dealt != honest and sorted(dealt) == sorted(honest)


def test_a_step_of_the_recipe(tmp_path, process_group):
    few = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1", "data.val_max_samples=4"]
    own = [*melody.RUNS["flow_grpo"], *task_runs.settings(0, 1), *few, "actor_rollout_ref.rollout.n=4"]
    task_runs.run_one(melody.TASK, tmp_path / "run", own)
    told = metrics(tmp_path / "run")[1]
    assert told["actor/first_ratio_max_dev"] < 1e-6 and 0 <= told["val-aux/pitch/in_tune/mean@1"] <= 1
    assert set(task_runs.curve(tmp_path / "run")) == {0, 1}


def test_the_command_has_the_notes_to_play(tmp_path):
    command = training_command(tmp_path, tmp_path / "run", [], "melody")
    assert f"actor_rollout_ref.model.path={task.CHECKPOINT}" in command
    rows = pq.read_table(tmp_path / "melody/val.parquet").to_pylist()
    assert len(rows) == task.VAL and {row["prompt"][0]["content"] for row in rows} == {"a tune"}
    assert rows[0]["data_source"] == "pitch" and rows[0]["reward_model"]["ground_truth"] == "C4 E4 G4 A4"
