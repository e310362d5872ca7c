"""`checkpoint.async_save`: training goes on while a checkpoint is written, and it counts when all of it is there."""

import errno
import threading

import pytest
from e2e_runs import metrics, run_here, settings
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from verl_omni.trainer.diffusion.policy_gradient_trainer import PolicyGradientRayTrainer
from verl_omni.trainer.run_folder.checkpointing import whole_checkpoints

BEHIND = "actor_rollout_ref.actor.checkpoint.async_save=true"
QUICK = ["data.val_files=null", "trainer.save_freq=1", "actor_rollout_ref.rollout.n=2", "trainer.logger=[jsonl]"]


@pytest.fixture
def held(monkeypatch):
    """No file of a training state is written until the step after it has been trained."""
    go_on, seen = threading.Event(), []
    write, next_step = HuggingFaceStorageWriter.write_data, PolicyGradientRayTrainer.training_step

    def write_data(self, plan, planner):
        assert go_on.wait(120), "nobody trains on"
        return write(self, plan, planner)

    def training_step(self, *args):
        done = next_step(self, *args)
        seen.append(list(whole_checkpoints(self.run_dir)))
        go_on.set()
        return done

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", write_data)
    monkeypatch.setattr(PolicyGradientRayTrainer, "training_step", training_step)
    return seen


def test_training_goes_on_and_the_checkpoints_are_those_of_a_run_that_waits(held, tmp_path, monkeypatch):
    run_here(settings(tmp_path / "behind", *QUICK, BEHIND), tmp_path, monkeypatch)
    assert held[:2] == [[], []], "the first checkpoint was not there when the second step had been trained"
    run_here(settings(tmp_path / "waits", *QUICK), tmp_path, monkeypatch)
    waits, behind = whole_checkpoints(tmp_path / "waits"), whole_checkpoints(tmp_path / "behind")
    assert list(waits) == list(behind) == [1, 2, 3]
    for step, checkpoint in waits.items():
        files = sorted(p.relative_to(checkpoint) for p in checkpoint.rglob("*.safetensors"))
        assert len(files) == 2
        for file in files:
            ours, theirs = load_file(behind[step] / file), load_file(checkpoint / file)
            assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours), (step, file)
    assert list(metrics(tmp_path / "behind")) == [1, 2, 3]


def test_a_disk_that_fills_up_meanwhile_ends_the_run_in_a_line(monkeypatch, tmp_path):
    def full(self, plan, planner):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", full)
    with pytest.raises(ValueError, match=r"the disk of .* is full: no checkpoint is there yet"):
        run_here(settings(tmp_path / "run", *QUICK, BEHIND), tmp_path, monkeypatch)
    assert not list((tmp_path / "run").glob("*global_step*"))
