"""A generator is made for a task, and a run learns on it: on a CPU, in miniature."""

import contextlib
import dataclasses
import itertools
import json
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.learning import learn, seconds_alone, settings
from benchmarks.side_by_side import Turns
from verl_omni.tasks import find_task, generator
from verl_omni.tasks.generator import SMALL, cut, follow, make_generator, size_of, untrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place, task = tmp_path_factory.mktemp("scenes"), find_task("scenes")
    make_generator(task, place / "model", SMALL, seconds=60, target=0.6)
    for split in ("train", "val"):
        rows = task.rows(split)[:: 60 if split == "train" else 40]
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def test_a_generator_says_how_it_was_made(folder):
    made = json.loads((folder / "model/recipe.json").read_text())
    assert made["task"] == "scenes" and made["step"] == SMALL.steps and 0 <= made["score"] < 0.6
    with pytest.raises(FileExistsError, match="choose another folder"):
        make_generator(find_task("scenes"), folder / "model", SMALL, 60, 0.6)


def test_another_goes_on_where_it_ended(folder, tmp_path, monkeypatch):
    task = find_task("scenes")
    turns = []

    @contextlib.contextmanager
    def turn():
        clock[0] += 50  # a long wait, which is no training
        yield
        turns.append(1)

    clock = [0.0]
    monkeypatch.setattr(generator, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    made = make_generator(task, tmp_path / "more", SMALL, 60, target=0.6, begun=folder / "model", turn=turn)
    assert len(turns) > SMALL.steps  # and when it is scored
    places = (folder / "model", made)
    before, after = ({part: weights(place, part) for part in ("vae", "transformer")} for place in places)
    assert all(torch.equal(after["vae"][name], tensor) for name, tensor in before["vae"].items())
    assert not all(torch.equal(after["transformer"][name], tensor) for name, tensor in before["transformer"].items())
    with pytest.raises(NotADirectoryError, match="holds no model"):
        make_generator(task, tmp_path / "none", SMALL, 60, 0.6, begun=tmp_path)


def weights(model, part):
    return load_file(model / part / "diffusion_pytorch_model.safetensors")


def test_a_generator_draws_with_the_average_of_its_weights():
    average, module = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    wanted = 0.9 * average.weight + 0.1 * module.weight
    follow(average, module, 0.9)
    torch.testing.assert_close(average.weight, wanted)


SIZES = {"scenes": (4e6, 20e6), "words": (20e6, 60e6), "signs": (20e6, 60e6)}


@pytest.mark.parametrize("name", SIZES)
def test_each_task_has_a_generator_of_the_size_that_is_meant(name):
    """Counted without a weight."""
    task = find_task(name)
    with torch.device("meta"):
        transformer = untrained(task, dataclasses.replace(size_of(task), text_width=128)).transformer
    least, most = SIZES[name]
    assert least < sum(p.numel() for p in transformer.parameters()) < most


def test_parts_of_pictures():
    pictures = torch.arange(64.0 * 64).reshape(1, 1, 1, 64, 64)
    part = cut(pictures, 32)
    assert part.shape[-2:] == (32, 32) and (part.diff(dim=-1) == 1).all() and (part.diff(dim=-2) == 64).all()
    assert cut(pictures, 100).shape == pictures.shape


def test_a_run_leaves_its_curve(folder, tmp_path, monkeypatch):
    little = [
        "data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.rollout.pipeline.num_inference_steps=2",
    ]  # fmt: skip
    given = settings("scenes", folder, "flow_grpo", 0, 1e-4, little)
    what = {"task": "scenes", "algorithm": "flow_grpo"}
    # A clock by which its time is over when it has taken its last step: it is whole all the same.
    clock = SimpleNamespace(monotonic=itertools.count().__next__, perf_counter=time.perf_counter)
    monkeypatch.setattr("benchmarks.learning.time", clock)
    limits = {"every": 1e-9, "most_steps": 3, "deadline": 2.5}
    curve = learn(what, given, str(tmp_path / "run"), 60.0, **limits, turns=Turns(tmp_path))
    first, *_, last = curve["points"]
    assert (first["images"], last["images"], len(curve["steps"])) == (0, 12, 3) and curve["whole"]
    assert last["seconds"] == pytest.approx(3 * curve["steps"][2][0], abs=0.01)  # of the step that had no neighbours
    assert set(last["tags"]) == set(first["tags"]) and 0 <= last["score"] <= 1 and last["diversity"] > 0
    assert json.loads((tmp_path / "run/so_far.json").read_text()) == curve
    with pytest.raises(TimeoutError, match="no time was left"):
        learn(what, given, str(tmp_path / "late"), 60.0, 1e-9, most_steps=9, deadline=0.0)


def test_seconds_are_those_of_the_steps_without_neighbours():
    assert seconds_alone([[9.0, 4, 0.1], [8.0, 4, 0.2]]) == 0
    timed = [[1.0, 4, 0.3], [3.0, 4, 0.3], [2.0, 4, 0.3]]
    assert seconds_alone([[9.0, 4, 0.1], [8.0, 4, 0.2], *timed, [7.0, 8, 0.4]]) == 14.0
