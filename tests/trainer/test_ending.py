"""However a run ends by itself, the last step that was learned to its end is saved, and its report is written.

The expectation is a run that nothing happened to: going on from what was saved gives its metrics and weights.
"""

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from e2e_runs import metrics, run_here, settings
from safetensors.torch import load_file

from verl_omni.trainer import interrupts
from verl_omni.trainer.diffusion import ending, zero_gradient
from verl_omni.trainer.diffusion.policy_gradient_trainer import PolicyGradientRayTrainer
from verl_omni.trainer.progress import progress
from verl_omni.trainer.run_folder.checkpointing import data_state, whole_checkpoints
from verl_omni.utils.errors import RunError
from verl_omni.utils.run_files import SAVE, STOP
from verl_omni.workers.engine.base import DiffusionEngine

REWARD = """
import pathlib

calls = 0

def compute_score(image, prompt):
    global calls
    calls += 1
    order = pathlib.Path(__file__).with_name("fail from")
    if order.exists() and calls >= int(order.read_text()):
        raise ConnectionError("the judge is gone")
    pixels = image.convert("L").getdata()
    return sum(pixels) / len(pixels) / 255
"""
VALIDATION, STEP = 2, 8  # scores of each, with `settings`
WEIGHTS = "global_step_3/export/pytorch_lora_weights.safetensors"
SETTINGS = (
    "reward.custom_reward_function.path=reward.py",
    "reward.retries=0",
    "reward.on_failure=stop",
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.optim.lr=0.01",
    "actor_rollout_ref.actor.ema_decay=0.5",
)


def run(folder: Path, monkeypatch, *more: str) -> None:
    (folder / "reward.py").write_text(REWARD)
    run_here(settings("run", *SETTINGS, *more), folder, monkeypatch)


@functools.cache
def _undisturbed(*more: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="undisturbed-"))
    with pytest.MonkeyPatch.context() as patch:
        run(folder, patch, *more)
    return folder / "run"


def same_end(folder: Path, other: Path) -> None:
    assert metrics(folder) == metrics(other)
    one, two = load_file(folder / WEIGHTS), load_file(other / WEIGHTS)
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_a_reward_that_fails_for_good(tmp_path, monkeypatch, process_group):
    (tmp_path / "fail from").write_text(str(VALIDATION + 2 * STEP + 3))  # in step 3
    with pytest.raises(Exception, match="the judge is gone"):
        run(tmp_path, monkeypatch)
    assert list(whole_checkpoints(tmp_path / "run")) == [2] and set(metrics(tmp_path / "run")) == {0, 1, 2}
    assert progress.report == "run/report.html" and (tmp_path / progress.report).stat().st_size
    (tmp_path / "fail from").unlink()
    run(tmp_path, monkeypatch)
    same_end(tmp_path / "run", _undisturbed())


@pytest.mark.parametrize(("mode", "behind"), [("one_step_off", 1), ("fully_async", 0)])
def test_the_next_step_begins_where_it_would_have_begun(tmp_path, monkeypatch, process_group, mode, behind):
    """Though its prompts have been read, and its groups taken to be learned from."""
    more = ("actor_rollout_ref.hybrid_engine=false", f"trainer.mode={mode}", f"trainer.max_staleness={behind}")
    learn = PolicyGradientRayTrainer.learn

    def fail(trainer, experience, timing):
        if trainer.global_step == 2:
            raise RuntimeError("the loss has a mistake")
        return learn(trainer, experience, timing)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a mistake"):
        patch.setattr(PolicyGradientRayTrainer, "learn", fail)
        run(tmp_path, monkeypatch, *more)
    expected = data_state(_undisturbed("trainer.save_freq=1", "trainer.max_ckpt_to_keep=null") / "global_step_2")
    assert data_state(tmp_path / "run/global_step_2")["loader"] == expected["loader"]


def test_a_validation_that_fails_is_done_when_the_run_goes_on(tmp_path, monkeypatch, process_group, capsys):
    """By default it is the last thing that a run does: nothing but the validation is left to do then."""
    (tmp_path / "fail from").write_text(str(VALIDATION + 3 * STEP + 1))
    with pytest.raises(Exception, match="the judge is gone"):
        run(tmp_path, monkeypatch)
    assert list(whole_checkpoints(tmp_path / "run")) == [3] and set(metrics(tmp_path / "run")) == {0, 1, 2, 3}
    (tmp_path / "fail from").unlink()
    run(tmp_path, monkeypatch)
    assert "Resuming from run/global_step_3" in capsys.readouterr().out
    same_end(tmp_path / "run", _undisturbed())
    assert not ending.checkpointing.validation_is_due(tmp_path / "run/global_step_3")


@pytest.mark.parametrize("touched", [False, True])
def test_only_weights_that_no_later_step_has_touched(tmp_path, monkeypatch, process_group, touched):
    """As a first ratio that is off, or a gradient that is not finite; the second mini-batch comes too late."""
    train_batch, batches = DiffusionEngine.train_batch, []

    def fail(engine, *args, **kwargs):
        batches.append(1)
        if len(batches) == 2 + 1 + touched:  # two a step
            raise FloatingPointError("the gradient's norm is nan")
        return train_batch(engine, *args, **kwargs)

    monkeypatch.setattr(DiffusionEngine, "train_batch", fail)
    with pytest.raises(FloatingPointError):
        run(tmp_path, monkeypatch)
    assert list(whole_checkpoints(tmp_path / "run")) == ([] if touched else [1])
    assert (tmp_path / "run/report.html").exists()


def test_steps_that_teach_nothing(tmp_path, monkeypatch, process_group):
    monkeypatch.setattr(zero_gradient, "MOST_IN_A_ROW", 2)
    (tmp_path / "reward.py").write_text("def compute_score(prompt):\n    return 1.0\n")
    with pytest.raises(RunError, match="nothing is learned"):
        run_here(settings("run", *SETTINGS), tmp_path, monkeypatch)
    assert list(whole_checkpoints(tmp_path / "run")) == [2] and (tmp_path / "run/report.html").exists()


def test_nothing_is_saved_where_that_is_asked_for(tmp_path, monkeypatch, process_group):
    (tmp_path / "fail from").write_text(str(VALIDATION + STEP + 3))
    with pytest.raises(Exception, match="the judge is gone"):
        run(tmp_path, monkeypatch, "trainer.save_freq=0")
    assert not whole_checkpoints(tmp_path / "run") and (tmp_path / "run/report.html").exists()


def test_what_cannot_be_saved_is_said_beside_the_reason_of_the_end(tmp_path, monkeypatch, process_group, capsys):
    (tmp_path / "fail from").write_text(str(VALIDATION + STEP + 3))

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ending.checkpointing, "check_room", full)
    with pytest.raises(Exception, match="the judge is gone"):
        run(tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert said.count("step 1 could not be saved: OSError") == 1 and "No space left" in said


def test_a_checkpoint_that_failed_is_not_tried_again(tmp_path, monkeypatch, process_group, capsys):
    def full(*args):
        raise ending.checkpointing.CheckpointError("the disk is full")

    monkeypatch.setattr(ending.checkpointing, "check_room", full)
    with pytest.raises(Exception, match="the disk is full"):
        run(tmp_path, monkeypatch, "trainer.save_freq=1")
    assert "could not be saved" not in capsys.readouterr().out


def wish_in_step(step: int, file: Path, monkeypatch) -> None:
    """Somebody leaves that file while the step is learned."""
    learn = PolicyGradientRayTrainer.learn

    def learn_and_wish(trainer, experience, timing):
        if trainer.global_step == step - 1:
            file.touch()
        return learn(trainer, experience, timing)

    monkeypatch.setattr(PolicyGradientRayTrainer, "learn", learn_and_wish)


def test_asked_to_stop_by_a_file_it_ends_as_by_a_signal(tmp_path, monkeypatch, process_group):
    """In step 2: it is finished and saved. What was asked of an earlier start is forgotten."""
    monkeypatch.setattr(interrupts, "_received", None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / STOP).touch()
    with monkeypatch.context() as patch:
        wish_in_step(2, tmp_path / "run" / STOP, patch)
        run(tmp_path, monkeypatch)
    assert interrupts.stop_requested() and not (tmp_path / "run" / STOP).exists()
    assert list(whole_checkpoints(tmp_path / "run")) == [2] and set(metrics(tmp_path / "run")) == {0, 1, 2}
    assert (tmp_path / "run/report.html").exists()
    monkeypatch.setattr(interrupts, "_received", None)
    run(tmp_path, monkeypatch)
    same_end(tmp_path / "run", _undisturbed())


def test_asked_to_save_by_a_file_it_saves_and_goes_on(tmp_path, monkeypatch, process_group):
    wish_in_step(1, tmp_path / "run" / SAVE, monkeypatch)
    run(tmp_path, monkeypatch)
    saved = whole_checkpoints(tmp_path / "run")
    assert list(saved) == [1, 3] and not (saved[1] / "in_between.txt").exists()  # nothing replaces it
    assert not (tmp_path / "run" / SAVE).exists()
    same_end(tmp_path / "run", _undisturbed())


def test_a_rank_that_does_not_end_its_drawing_is_given_up(capsys, monkeypatch):
    """It waits for another, whose forward has failed: the run ends all the same, with a line."""
    trainer = object.__new__(PolicyGradientRayTrainer)
    trainer.online, trainer.actor_wg = True, "workers"
    trainer.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(hybrid_engine=True))
    asked = []
    monkeypatch.setattr(ending, "answers", lambda *given: asked.append(given))
    whole = SimpleNamespace(step=2, changes=[1])
    saving = SimpleNamespace(misses=lambda step: True)
    checkpoints = SimpleNamespace(whole=whole, unpublished=None, saving=saving)
    ending.save_what_is_whole(checkpoints, lambda: [1], trainer._save_after_failure, pytest.fail)
    assert asked == [("workers", "stop_rollout", ending.SECONDS_TO_END_DRAWING)]
    assert "step 2 could not be saved: a rank is still drawing" in capsys.readouterr().out
