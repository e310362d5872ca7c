"""A checkpoint is whole or not there, and a run goes on from its own; no run of its own."""

import errno
import hashlib
import json
import os
import shutil
import subprocess

import pytest
from ray.exceptions import RayTaskError

from verl_omni.trainer.run_folder.checkpointing import (
    IN_BETWEEN,
    begin,
    check_room,
    find_resume,
    publish,
    whole_checkpoints,
)

LATEST = "latest_checkpointed_iteration.txt"
RUN = {"settings": {}, "content": {}}


def save(folder, step, keep=None, error=None):
    with publish(folder, step, RUN, keep) as writing:
        (writing / "state").mkdir()
        (writing / "state" / "tensors.safetensors").write_text(f"tensors {step}")
        (writing / "trainer.json").write_text(f"state {step}")
        if error:
            raise error


def found(folder, mode="auto", path=None):
    return find_resume(folder, mode, path)[0]


def test_a_save_that_fails_leaves_nothing(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(OSError, match="broken cable"):
        save(tmp_path, 2, error=OSError("broken cable"))
    assert {p.name for p in tmp_path.iterdir()} == {"global_step_1", LATEST}
    assert found(tmp_path) == tmp_path / "global_step_1"
    (tmp_path / ".writing_global_step_2").mkdir()  # what a killed run leaves
    save(tmp_path, 2)
    assert {p.name for p in tmp_path.iterdir()} == {"global_step_1", "global_step_2", LATEST}


def test_none_is_deleted_before_there_are_too_many(tmp_path):
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step, keep=4)
        left = list(whole_checkpoints(tmp_path))
        assert left == [10, 20, 30, 40, 50][max(0, step // 10 - 4) : step // 10]


def test_one_in_between_pushes_none_out_that_was_asked_for(tmp_path):
    for step in (100, 120, 140, 200, 220):
        with publish(tmp_path, step, RUN, keep=2) as writing:
            if step % 100:
                (writing / IN_BETWEEN).touch()
    assert {100, 200} <= whole_checkpoints(tmp_path).keys()


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 9, 10):
        save(tmp_path, step, keep=2)
    assert list(whole_checkpoints(tmp_path)) == [9, 10]
    save(tmp_path, 11, keep=1)
    assert list(whole_checkpoints(tmp_path)) == [11]


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "global_step_3" / "old").write_text("")
    save(tmp_path, 3)
    assert {p.name for p in (tmp_path / "global_step_3").iterdir()} == {
        *("manifest.json", "manifest.sha256", "state", "trainer.json")
    }


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


# ---- whose checkpoint it is --------------------------------------------------------------------------


def test_a_run_over_an_old_folder_goes_on_from_its_own(tmp_path):
    """An older run got to step 100. A new one starts from nothing, is killed, saves step 10, is killed again."""
    save(tmp_path, 100)
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_text("of the older run")
    begin(tmp_path, None)
    assert found(tmp_path) is None, "killed before its first checkpoint, the new run starts from nothing again"
    save(tmp_path, 10, keep=1)
    assert found(tmp_path) == tmp_path / "global_step_10"
    earlier = tmp_path / "earlier_1"
    assert {p.name for p in earlier.iterdir()} == {"config.yaml", "metrics.jsonl", "global_step_100", LATEST}
    assert (earlier / LATEST).read_text().split()[0] == "100"
    assert found(earlier) == earlier / "global_step_100", "the older run is still whole"


def test_a_run_that_goes_back_leaves_its_former_steps_behind(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    begin(tmp_path, tmp_path / "global_step_1")
    assert list(whole_checkpoints(tmp_path)) == [1] and found(tmp_path) == tmp_path / "global_step_1"
    assert list(whole_checkpoints(tmp_path / "earlier_1")) == [2, 3]
    begin(tmp_path, tmp_path / "global_step_1")
    assert not (tmp_path / "earlier_2").exists()


def test_a_run_that_starts_from_another_folders_checkpoint_has_none_of_its_own(tmp_path):
    save(tmp_path / "one", 5)
    save(tmp_path / "two", 3)
    begin(tmp_path / "two", tmp_path / "one" / "global_step_5")
    assert found(tmp_path / "two") is None and list(whole_checkpoints(tmp_path / "two" / "earlier_1")) == [3]


def test_killed_between_a_checkpoint_and_its_note(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / LATEST).write_text("1")
    assert found(tmp_path) == tmp_path / "global_step_1"


@pytest.mark.parametrize("text", [None, "", "two", "-1", "2 a b", "9" * 5000, "\u0662"])
def test_without_a_note_nobody_guesses(tmp_path, text):
    assert found(tmp_path) is None
    save(tmp_path, 2)
    (tmp_path / LATEST).unlink() if text is None else (tmp_path / LATEST).write_text(text)
    with pytest.raises(ValueError, match=f"trainer.resume_from_path={tmp_path / 'global_step_2'}, or start anew"):
        found(tmp_path)


def test_what_is_no_checkpoint_is_passed_over(tmp_path):
    (tmp_path / "global_step_99").mkdir()
    assert find_resume(tmp_path, "auto", None)[0] is None
    begin(tmp_path, None)
    assert not (tmp_path / "earlier_1").exists()
    save(tmp_path, 1)
    chosen, (notice,) = find_resume(tmp_path, "auto", None)
    assert chosen == tmp_path / "global_step_1"
    assert notice == f"{tmp_path / 'global_step_99'} is no checkpoint (it holds no manifest.json) and is passed over."


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_a_checkpoint_of_pickles_is_refused(tmp_path, mode):
    old = tmp_path / "global_step_3"
    old.mkdir()
    (old / "trainer.pt").write_bytes(b"")
    (tmp_path / LATEST).write_text("3")
    with pytest.raises(ValueError, match="written by an earlier version, as pickles"):
        found(tmp_path, mode, str(old))


@pytest.mark.parametrize(
    ("mode", "path", "said"),
    [
        ("atuo", None, "expected auto, auto_previous, disable or resume_path"),
        ("resume_path", None, "needs trainer.resume_from_path="),
        ("resume_path", "{folder}/global_step_7", "is no checkpoint"),
        ("resume_path", "{folder}", "is no checkpoint"),
    ],
)
def test_what_cannot_be_resumed_is_said(tmp_path, mode, path, said):
    with pytest.raises(ValueError, match=said):
        find_resume(tmp_path, mode, path and path.format(folder=tmp_path))


# ---- damage ------------------------------------------------------------------------------------------


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def write_manifest(folder, content):
    """Another manifest with a checksum that fits, as someone would write who means it."""
    (folder / "manifest.json").write_text(content)
    told = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    (folder / "manifest.sha256").write_text(f"{told}  manifest.json\n")
    (folder.parent / LATEST).write_text(f"{folder.name.removeprefix('global_step_')}\n")


def edit_manifest(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    write_manifest(folder, json.dumps(manifest))


def edited(**changes):
    return lambda folder: edit_manifest(folder, lambda manifest: manifest.update(changes))


def file_entry(name="trainer.json", **changes):
    def change(manifest):
        manifest["files"][name] = manifest["files"]["trainer.json"] | changes

    return lambda folder: edit_manifest(folder, change)


def unlabelled(folder):
    edit_manifest(folder, lambda manifest: manifest.pop("run"))


def replaced(name, by):
    def act(folder):
        (folder / name).unlink()
        by(folder / name)

    return act


def made_older(folder):
    """By hand: neither checksum of it is changed."""
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))


TENSORS, OVERWRITTEN = "state/tensors.safetensors", "manifest.json is cut off or overwritten"
DEEP = "[" * 100_000 + "]" * 100_000
DAMAGE = {
    "truncated": (lambda c: (c / TENSORS).write_text("tens"), f"{TENSORS} has 4 bytes and was written with 9"),
    "flipped": (lambda c: flip_a_bit(c / TENSORS), f"{TENSORS} does not have the content that was written"),
    "missing": (lambda c: (c / TENSORS).unlink(), f"{TENSORS} is missing"),
    "added": (lambda c: (c / "state" / "x.safetensors").write_text(""), "state/x.safetensors was added to it"),
    "a pipe added": (lambda c: os.mkfifo(c / "state/x.safetensors"), "state/x.safetensors was added to it"),
    "a broken link added": (
        lambda c: (c / "state/x.safetensors").symlink_to("/no/such/file"), "state/x.safetensors was added to it"
    ),
    "a link to another file added": (
        lambda c: (c / "state/x.safetensors").symlink_to(c / TENSORS), "state/x.safetensors was added to it"
    ),
    "a folder added": (lambda c: (c / "state/x.safetensors").mkdir(), "state/x.safetensors was added to it"),
    "a pipe in its place": (replaced(TENSORS, os.mkfifo), f"{TENSORS} is no regular file"),
    "a broken link in its place": (
        replaced(TENSORS, lambda path: path.symlink_to("/no/such/file")), f"{TENSORS} is missing"
    ),
    "a device in its place": (replaced(TENSORS, lambda path: path.symlink_to("/dev/zero")), "is no regular file"),
    "empty state": (lambda c: (c / "trainer.json").write_text(""), "trainer.json has 0 bytes and was written with 7"),
    "truncated manifest": (lambda c: (c / "manifest.json").write_text('{"format": 1, "fi'), OVERWRITTEN),
    "empty manifest": (lambda c: (c / "manifest.json").write_text(""), OVERWRITTEN),
    "manifest of a list": (lambda c: (c / "manifest.json").write_text("[1]"), OVERWRITTEN),
    "manifest with a flipped bit": (lambda c: flip_a_bit(c / "manifest.json"), "damaged: manifest.json "),
    "manifest of another step": (
        lambda c: (c / "manifest.json").write_text((c / "manifest.json").read_text().replace('step": 3', 'step": 1')),
        "does not have the content that manifest.sha256 was written for",
    ),
    "manifest of another step with its checksum": (edited(global_step=1), "says that it is of step 1, not that of the"),
    "manifest of no step": (edited(global_step=[3]), "says that it is of step [3], not that of the folder's name"),
    "manifest of another save": (
        lambda c: (c.parent / LATEST).write_text(f"3\n{'0' * 64}\n"), "is not the one whose checksum is in "
    ),
    "manifest made an earlier version's": (
        made_older,
        "does not have the content that manifest.sha256 was written for",
    ),
    "manifest made an earlier version's, with a broken link for a checksum": (
        lambda c: (edited(format=1)(c), replaced("manifest.sha256", lambda p: p.symlink_to("/no/such"))(c)),
        "manifest.sha256 is a broken link",
    ),
    "manifest made an earlier version's, without its checksum": (
        lambda c: (made_older(c), (c / "manifest.sha256").unlink()), "is not the one whose checksum is in"
    ),
    "no checksum": (lambda c: (c / "manifest.sha256").unlink(), "manifest.sha256 is missing"),
    "a pipe for a checksum": (replaced("manifest.sha256", os.mkfifo), "manifest.sha256 is no regular file"),
    "a pipe for a manifest": (replaced("manifest.json", os.mkfifo), OVERWRITTEN),
    "nested manifest": (lambda c: write_manifest(c, DEEP), "nested more than 64 levels deep"),
    "nested run": (
        lambda c: write_manifest(c, (c / "manifest.json").read_text().replace('"settings": {}', f'"settings": {DEEP}')),
        "nested more than 64 levels deep",
    ),
    "manifest without a run": (unlabelled, "does not say of which run it is"),
    "manifest with a list for a run": (edited(run=[1]), "does not say of which run it is"),
    "manifest without files": (lambda c: edit_manifest(c, lambda m: m.pop("files")), OVERWRITTEN),
    "manifest with a list of files": (edited(files=[1]), OVERWRITTEN),
    "endless file": (file_entry(bytes=float("inf")), OVERWRITTEN),
    "a file of 10^5000 bytes": (
        lambda c: write_manifest(c, (c / "manifest.json").read_text().replace('"bytes": 7', f'"bytes": {"9" * 5000}')),
        OVERWRITTEN,
    ),
    "a name of 5,000 letters": (file_entry("x" * 5000), "xxx is missing"),
    "a name with a null byte": (file_entry("x\0"), " is missing"),
    "file outside": (file_entry("../x"), "names ../x, which lies outside"),
    "gone": (shutil.rmtree, "names global_step_3, which is not there"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_the_user_decides(tmp_path, name):
    damage, said = DAMAGE[name]
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "global_step_3")
    with pytest.raises(ValueError) as caught:
        found(tmp_path)
    line = str(caught.value)
    assert said in line and "global_step_3" in line and "\n" not in line and len(line) < 1000
    assert f"go on from {tmp_path / 'global_step_2'} with trainer.resume_mode=auto_previous" in line

    chosen, notices = find_resume(tmp_path, "auto_previous", None)
    assert chosen == tmp_path / "global_step_2" and any(said in notice for notice in notices)
    flip_a_bit(tmp_path / "global_step_2" / TENSORS)
    assert found(tmp_path, "auto_previous") == tmp_path / "global_step_1"
    flip_a_bit(tmp_path / "global_step_1" / TENSORS)
    with pytest.raises(ValueError, match="No whole checkpoint is left"):
        found(tmp_path, "auto_previous")


def test_one_of_an_earlier_version_has_no_checksum_of_its_manifest(tmp_path):
    save(tmp_path, 3)
    checkpoint = tmp_path / "global_step_3"
    edited(format=1)(checkpoint)
    (checkpoint / "manifest.sha256").unlink()
    for mode in ("auto", "auto_previous", "resume_path"):
        chosen, (notice,) = find_resume(tmp_path, mode, str(checkpoint))
        assert chosen == checkpoint and "an earlier version, which left no checksum of manifest.json" in notice
    edited(global_step=2)(checkpoint)
    with pytest.raises(ValueError, match="says that it is of step 2"):
        found(tmp_path)


def test_the_checksum_is_one_that_other_programs_know(tmp_path):
    save(tmp_path, 3)
    checkpoint = tmp_path / "global_step_3"
    subprocess.run(["sha256sum", "-c", "manifest.sha256"], cwd=checkpoint, check=True, capture_output=True)
    told = (checkpoint / "manifest.sha256").read_text().split()[0]
    assert (tmp_path / LATEST).read_text() == f"3\n{told}\n"
    begin(tmp_path, checkpoint)
    assert (tmp_path / LATEST).read_text() == f"3\n{told}\n"


def test_what_lies_beside_the_state_is_not_opened(tmp_path):
    save(tmp_path, 3)
    os.mkfifo(tmp_path / "global_step_3" / "notes")
    assert found(tmp_path) == tmp_path / "global_step_3"


def test_a_note_that_is_a_pipe_is_not_waited_for(tmp_path):
    save(tmp_path, 3)
    replaced(LATEST, os.mkfifo)(tmp_path)
    with pytest.raises(ValueError, match=f"{LATEST} is no regular file"):
        found(tmp_path)


def test_a_whole_checkpoint_is_what_auto_previous_takes_too(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert find_resume(tmp_path, "auto_previous", None) == (tmp_path / "global_step_2", [])


# ---- a full disk -------------------------------------------------------------------------------------


def test_a_checkpoint_that_does_not_fit_is_not_begun(tmp_path):
    save(tmp_path, 1)
    free = shutil.disk_usage(tmp_path).free
    check_room(tmp_path, free // 2)
    with pytest.raises(ValueError, match=r"needs .* GB and the disk of .* has .* GB left: the last whole"):
        check_room(tmp_path, 2 * free)


FULL = OSError(errno.ENOSPC, "No space left")
OF_A_WORKER = RayTaskError("save", "its traceback", FULL).as_instanceof_cause()


@pytest.mark.parametrize("error", [FULL, OF_A_WORKER, Exception("I/O error (os error 28)")])
def test_a_disk_that_fills_up_meanwhile(tmp_path, error):
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="is full: the last whole checkpoint is .*global_step_1. Make room") as caught:
        save(tmp_path, 2, error=error)
    assert caught.value.__cause__ is error
    assert {p.name for p in tmp_path.iterdir()} == {"global_step_1", LATEST}, "what was begun takes no room"
