"""`trainer.keep_best`: the checkpoint with the best validation stays, whatever else goes, and can be named."""

from pathlib import Path

import pytest
from e2e_runs import metrics, run_here, settings
from refusals import refused

from verl_omni.cli.trained import find_weights
from verl_omni.config.schema import TrainerConfig
from verl_omni.trainer.run_folder import checkpointing
from verl_omni.trainer.run_folder.checkpointing import BEST, CheckpointError, best_step, publish, read_best
from verl_omni.trainer.run_folder.saving import Saving, validation_score

# Validation draws two images after each step: the scores of each are those of the step's place in this list.
REWARD = """
SCORES = {scores}
calls = []

def compute_score(image, extra_info):
    if extra_info["split"] != "test":
        return sum(image.convert("L").getdata()) % 97 / 97
    calls.append(1)
    return SCORES[(len(calls) - 1) // 2]
"""


def save(folder: Path, when: Saving, step: int, score: float, keep: int | None, last: bool = False) -> None:
    """As the trainer does after a validation."""
    when.see(step, {"val-core/a/reward/mean@1": score, "val-core/b/reward/mean@1": score}, folder)
    if when.is_due(step, last):
        with publish(folder, step, {}, keep, when.best_score(step)) as writing:
            (writing / "weights").touch()
            if not when.is_asked_for(step, last):
                when.mark(writing)
        when.saved(folder, step)


def steps(folder: Path) -> list[int]:
    return list(checkpointing.whole_checkpoints(folder))


def test_it_stays_until_a_better_one_is_there(tmp_path):
    when = Saving(TrainerConfig(save_freq=3, keep_best=True))
    kept = {1: [1], 2: [2], 3: [2, 3], 4: [2, 3], 5: [3, 5], 6: [5, 6], 7: [5, 6], 9: [5, 9], 12: [5, 12], 15: [15]}
    scores = {1: 0.1, 2: 0.5, 3: 0.2, 4: 0.4, 5: 0.6, 6: 0.6, 7: 0.1, 9: 0.3, 12: 0.3, 15: 0.7}
    for step, expected in kept.items():
        save(tmp_path, when, step, scores[step], keep=1)
        assert steps(tmp_path) == expected, step
    assert read_best(tmp_path) == (15, 0.7)


def test_only_where_it_is_asked_for(tmp_path):
    when = Saving(TrainerConfig(save_freq=-1))
    save(tmp_path, when, 1, 0.9, None)
    save(tmp_path, when, 2, 0.1, None, last=True)
    assert steps(tmp_path) == [2] and best_step(tmp_path) is None


def test_the_score_is_the_mean_over_data_sources():
    assert validation_score({"val-core/a/reward/mean@1": 0.2, "val-core/b/reward/mean@1": 0.6, "val-aux/x": 9}) == 0.4
    assert validation_score({"critic/rewards/mean": 1.0}) is None


def test_a_file_that_says_nothing_is_named(tmp_path):
    (tmp_path / BEST).write_text("the third\n")
    with pytest.raises(CheckpointError, match="names no step and score"):
        read_best(tmp_path)


@pytest.mark.parametrize(("source", "left"), [(2, 2), (1, None)])
def test_a_run_that_goes_back_before_it_has_none(tmp_path, source, left):
    when = Saving(TrainerConfig(save_freq=1, keep_best=True))
    for step, score in ((1, 0.1), (2, 0.5), (3, 0.2)):
        save(tmp_path, when, step, score, None)
    checkpointing.begin(tmp_path, tmp_path / f"global_step_{source}")
    assert best_step(tmp_path) == left
    assert (tmp_path / "earlier_1" / BEST).exists() == (left is None)


def test_a_run_from_nothing_has_none(tmp_path):
    save(tmp_path, Saving(TrainerConfig(save_freq=1, keep_best=True)), 1, 0.5, None)
    checkpointing.begin(tmp_path, None)
    assert best_step(tmp_path) is None and (tmp_path / "earlier_1" / BEST).exists()


def test_a_run_keeps_it_and_commands_can_name_it(tmp_path, monkeypatch, process_group, capsys):
    (tmp_path / "reward.py").write_text(REWARD.format(scores=[0.3, 0.8, 0.4]))
    arguments = settings(
        tmp_path / "run", "reward.custom_reward_function.path=reward.py", "trainer.keep_best=true",
        "trainer.test_freq=1", "trainer.val_before_train=false", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.pipeline.num_inference_steps=2", "trainer.max_ckpt_to_keep=1",
    )  # fmt: skip
    run_here(arguments, tmp_path, monkeypatch)
    told = metrics(tmp_path / "run")
    assert [told[s]["training/best_step"] for s in (1, 2, 3)] == [1, 2, 2]
    assert told[3]["training/best_score"] == pytest.approx(0.8)
    assert steps(tmp_path / "run") == [2, 3]
    assert "the best validation (0.8) was that of global_step_2" in capsys.readouterr().out
    assert find_weights(tmp_path / "run/best").export == tmp_path / "run/global_step_2/export"
    assert find_weights(tmp_path / "run").export == tmp_path / "run/global_step_3/export"
    assert "best validation 0.800 at step 2, which is kept" in (tmp_path / "run/report.html").read_text()
    (tmp_path / "run" / BEST).unlink()
    with pytest.raises(FileNotFoundError, match="keeps no best checkpoint: a run with trainer.keep_best=true does"):
        find_weights(tmp_path / "run/best")


def test_without_a_validation_it_is_refused():
    assert "this run has none: set data.val_files" in refused("trainer.keep_best=true")
    assert "has no effect with trainer.save_freq=0" in refused("trainer.keep_best=true", "trainer.save_freq=0")
