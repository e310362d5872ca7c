"""Each reward's own numbers, and the word that is said of one that looks wrong."""

import numpy as np
import pytest
import torch
from verl.protocol import DataProto

from verl_omni.trainer.diffusion.reward_metrics import RewardWatch, reward_metrics
from verl_omni.trainer.diffusion.validation import write_samples
from verl_omni.utils.arrays import object_array
from verl_omni.utils.json_files import read_lines

RNG = np.random.default_rng(0)


def test_numbers_of_each_reward():
    told = [
        {"ocr": 0.0, "pick": 20.0},
        {"ocr": 0.0, "pick": 22.0},
        {"ocr": 1.0, "pick": 24.0},
        {"ocr": 0.5, "pick": 24.0},
    ]
    batch = DataProto.from_dict(
        {"sample_level_rewards": torch.zeros(4)},
        {"uid": object_array(["a", "a", "b", "b"]), "reward_extra_info": object_array(told)},
    )
    found = reward_metrics(batch, ["ocr", "pick"])
    assert found["reward/ocr/mean"] == 0.375 and found["reward/pick/mean"] == 22.5
    assert found["reward/pick/std"] == np.std([20, 22, 24, 24])
    assert (found["reward/pick/min"], found["reward/pick/max"]) == (20.0, 24.0)
    assert (found["reward/ocr/zero_std_ratio"], found["reward/pick/zero_std_ratio"]) == (0.5, 0.5)
    assert found["reward/failed"] == 0.0


def test_one_reward_has_the_name_of_its_data_source():
    batch = DataProto.from_dict(
        {"sample_level_rewards": torch.tensor([1.0, 3.0, 5.0])},
        {"uid": object_array(["a", "a", "b"]), "data_source": object_array(["ocr", "ocr", "geneval"])},
    )
    found = reward_metrics(batch, [])
    assert (found["reward/ocr/mean"], found["reward/geneval/mean"]) == (2.0, 5.0)


def test_a_reward_that_never_changes_has_no_course():
    """The mean of three scores of 0.7 is a rounding step below that of six, and less than that would be a fall."""
    watch, lines = RewardWatch(), []
    for step in range(25):
        images = 6 if step < 10 else 3  # others failed
        batch = DataProto.from_dict(
            {"sample_level_rewards": torch.zeros(images)},
            {"uid": object_array(["a"] * images), "reward_extra_info": object_array([{"clip": 0.7}] * images)},
        )
        found = reward_metrics(batch, ["clip"])
        assert (found["reward/clip/mean"], found["reward/clip/std"]) == (0.7, 0.0)
        lines += watch.see(found)
    assert [line for line in lines if "worse" in line] == []


def said(weights=None, images=4, **courses) -> list[str]:
    """All that is said of rewards whose means take these courses, step by step: (mean, share of groups alike)."""
    watch, lines = RewardWatch(weights), []
    for step in range(len(next(iter(courses.values())))):
        metrics = {"critic/rewards/group_size": images}
        for name, course in courses.items():
            metrics[f"reward/{name}/mean"], metrics[f"reward/{name}/zero_std_ratio"] = course[step]
        lines += watch.see(metrics)
    return lines


def course(start: float, end: float, alike: float = 0.0, steps: int = 40) -> list[tuple[float, float]]:
    return [(mean + RNG.normal(0, 0.02), alike) for mean in np.linspace(start, end, steps)]


def test_a_reward_that_rises_is_nothing_to_speak_of():
    assert said(ocr=course(0.3, 0.9), pick=course(0.5, 0.5)) == []


def test_saturated_is_said_once():
    (line,) = said(ocr=course(1.0, 1.0, alike=0.95))
    assert 'reward "ocr": for 10 steps' in line and "nothing more to teach" in line


def test_collapsed():
    (line,) = said(ocr=course(0.8, 0.2))
    assert line.startswith('reward "ocr" has gone from 0.7') and "which is worse" in line
    (line,) = said({"size": -1.0}, size=course(0.2, 0.8))
    assert "which is worse" in line


def test_less_of_what_has_a_negative_weight_is_better():
    assert said({"size": -1.0}, size=course(0.8, 0.2)) == []


def test_one_against_the_other():
    lines = said(ocr=course(0.3, 0.9), pick=course(0.9, 0.3))
    assert any('reward "ocr" gets better while "pick" gets worse' in line for line in lines)
    assert sum("gets better while" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("size", "last_words"),
    [
        (24, "reward.scorers, and at rollout.n: groups of 24 images, as here, speed it up"),
        (15.5, "in reward.scorers"),
    ],
)
def test_a_large_group_is_named_where_one_reward_is_given_up_for_another(size, last_words):
    lines = said(images=size, ocr=course(0.3, 0.9), pick=course(0.9, 0.3))
    (against,) = [line for line in lines if "gets better while" in line]
    assert against.endswith(last_words)
    assert not any("rollout.n" in line for line in lines if line != against)


def test_samples_are_written_whole_or_not_at_all(tmp_path):
    """Somebody looks while they are written, or the run is killed, or cannot say what a reward told."""

    class Unspeakable:
        def __str__(self):
            raise OSError("No space left on device")

    def samples(*told) -> DataProto:
        columns = {"written": {"image": "x.png"}, "reward_model": {}, "prompt": "a cat", "data_source": "a", "seed": 1}
        rows = {name: object_array([value] * len(told)) for name, value in columns.items()}
        rows["reward_extra_info"] = object_array([{"told": one} for one in told])
        return DataProto.from_dict({"rm_scores": torch.ones(len(told), 1)}, rows)

    def read() -> list:
        return [row["reward_extra_info"]["told"] for _, row in read_lines(tmp_path / "samples.jsonl")]

    write_samples(samples(1, 2), tmp_path)
    for mode in ("w", "a"):
        with pytest.raises(OSError, match="No space"):
            write_samples(samples("long" * 10_000, Unspeakable()), tmp_path, mode)
        assert read() == [1, 2]
    write_samples(samples(3), tmp_path, "a")
    assert read() == [1, 2, 3]
