"""A checkpoint is whole or not there; no run of its own."""

import pytest

from verl_omni.trainer.diffusion.checkpointing import find_resume, publish, whole_checkpoints


def save(folder, step, keep=None, error=None):
    with publish(folder, step, keep) as writing:
        (writing / "trainer.pt").write_text(f"state {step}")
        if error:
            raise error


def test_a_save_that_fails_publishes_nothing_and_the_next_one_cleans_up(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 2, error=OSError("disk full"))
    assert list(whole_checkpoints(tmp_path)) == [1]
    assert find_resume(tmp_path, "auto", None) == tmp_path / "global_step_1"
    save(tmp_path, 2)
    assert {p.name for p in tmp_path.iterdir()} == {
        "global_step_1", "global_step_2", "latest_checkpointed_iteration.txt"
    }  # fmt: skip


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 9, 10):
        save(tmp_path, step, keep=2)
    assert list(whole_checkpoints(tmp_path)) == [9, 10]
    save(tmp_path, 11, keep=1)
    assert list(whole_checkpoints(tmp_path)) == [11]


def test_what_was_just_written_is_never_deleted(tmp_path):
    """A run that starts anew in the folder of a longer one."""
    save(tmp_path, 100, keep=1)
    save(tmp_path, 1, keep=1)
    assert list(whole_checkpoints(tmp_path)) == [1, 100]


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "global_step_3" / "old").write_text("")
    save(tmp_path, 3)
    assert [p.name for p in (tmp_path / "global_step_3").iterdir()] == ["trainer.pt"]


def test_a_deletion_that_was_interrupted_leaves_no_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2, keep=1)
    assert list(whole_checkpoints(tmp_path)) == [2]
    save(tmp_path, 3)
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {"global_step_2", "global_step_3"}


@pytest.mark.parametrize(
    ("mode", "path", "said"),
    [
        ("atuo", None, "expected auto, disable or resume_path"),
        ("resume_path", None, "needs trainer.resume_from_path="),
        ("resume_path", "{folder}/global_step_7", "is no checkpoint"),
        ("resume_path", "{folder}", "is no checkpoint"),
    ],
)
def test_what_cannot_be_resumed_is_said(tmp_path, mode, path, said):
    with pytest.raises(ValueError, match=said):
        find_resume(tmp_path, mode, path and path.format(folder=tmp_path))
