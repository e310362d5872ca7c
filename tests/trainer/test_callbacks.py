"""Classes of a user's own that a run calls: when, with what, and what becomes of one that is wrong or fails."""

import json
import shutil
from pathlib import Path

import pytest
from e2e_runs import metrics, run_here, settings

from verl_omni.trainer import interrupts
from verl_omni.trainer.callbacks import Callback, callback_class
from verl_omni.trainer.run_folder.checkpointing import whole_checkpoints
from verl_omni.utils.errors import RunError

NOTES = '''
import json, pathlib
from verl_omni.trainer.callbacks import Callback

FILE = pathlib.Path("notes.jsonl")

class Notes(Callback):
    """Every call, in a file, and what it was told."""

    def note(self, event, run, **told):
        with FILE.open("a") as lines:
            lines.write(json.dumps({"event": event, "step": run.step, **told}) + "\\n")

    def on_run_start(self, run):
        self.note("start", run, of=run.total_steps, seed=run.config.trainer.seed, folder=run.folder.name)

    def on_step_end(self, run, step):
        own = [name for name in ("critic/rewards/mean", "actor/loss", "timing_s/step") if name in step.metrics]
        step.metrics["mine/double"] = 2 * step.metrics["critic/rewards/mean"]
        validated = any(name.startswith("val-core/") for name in step.metrics)
        self.note("step", run, number=step.number, own=own, last=step.last, rows=len(step.batch), validated=validated)

    def on_validation(self, run, metrics):
        self.note("validation", run, names=[name for name in metrics if name.startswith("val-core/")],
                  samples=(run.folder / f"validation/step_{run.step}/samples.jsonl").exists())

    def on_checkpoint(self, run, folder):
        self.note("checkpoint", run, folder=folder.name, whole=(folder / "manifest.json").exists())

    def on_run_end(self, run, error):
        self.note("end", run, error=None if error is None else str(error))


class Second(Notes):
    def on_step_end(self, run, step):
        self.note("second", run, seen=step.metrics["mine/double"])
        if run.step == 2:
            raise KeyError("no such number")


class Stops(Callback):
    def on_step_end(self, run, step):
        run.stop()


class Text(Callback):
    def on_step_end(self, run, step):
        step.metrics["word"] = "high"


class Misspelt(Callback):
    def on_step_ended(self, run, step):
        pass


class Asks(Callback):
    def __init__(self, path):
        pass


class Other:
    pass
'''


def run(folder: Path, monkeypatch, callbacks: str, *more: str) -> list[dict]:
    (folder / "notes.py").write_text(NOTES)
    run_here(settings("run", f"trainer.callbacks=[{callbacks}]", "trainer.save_freq=2", *more), folder, monkeypatch)
    return notes(folder)


def notes(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


def test_each_moment_of_a_run(tmp_path, monkeypatch, process_group):
    told = run(tmp_path, monkeypatch, "notes.py:Notes")
    order = [(note["event"], note["step"]) for note in told]
    assert order == [
        *[("start", 0), ("validation", 0), ("step", 1), ("step", 2), ("checkpoint", 2)],
        *[("validation", 3), ("step", 3), ("checkpoint", 3), ("end", 3)],
    ]
    assert told[0] == {"event": "start", "step": 0, "of": 3, "seed": 0, "folder": "run"}
    steps = [note for note in told if note["event"] == "step"]
    assert all(note["own"] == ["critic/rewards/mean", "actor/loss", "timing_s/step"] for note in steps)
    assert [(note["number"], note["last"]) for note in steps] == [(1, False), (2, False), (3, True)]
    assert all(note["rows"] == 8 for note in steps)
    assert [note["validated"] for note in steps] == [False, False, True]
    assert all(note["names"] and note["samples"] for note in told if note["event"] == "validation")
    assert all(note["whole"] for note in told if note["event"] == "checkpoint") and told[-1]["error"] is None
    logged = metrics(tmp_path / "run")
    for number in (1, 2, 3):  # what a callback adds is logged
        assert logged[number]["mine/double"] == 2 * logged[number]["critic/rewards/mean"]


def test_one_that_fails_ends_the_run_in_a_line_that_names_it(tmp_path, monkeypatch, process_group):
    with pytest.raises(RunError) as failure:
        run(tmp_path, monkeypatch, "notes.py:Notes,notes.py:Second")
    expected = "trainer.callbacks: notes.py:Second failed in on_step_end: KeyError: 'no such number'"
    assert str(failure.value) == expected
    told = notes(tmp_path)
    assert [note["event"] for note in told if note["step"] == 1] == ["step", "second"]  # in the order of the list
    assert [note["error"] for note in told if note["event"] == "end"] == [expected, expected]
    # The step is learned: it is logged and saved, and the same command goes on from there.
    assert set(metrics(tmp_path / "run")) == {0, 1, 2} and list(whole_checkpoints(tmp_path / "run")) == [2]
    shutil.rmtree(tmp_path / "run/validation")
    run(tmp_path, monkeypatch, "notes.py:Notes")
    assert set(metrics(tmp_path / "run")) == {0, 1, 2, 3}


def test_what_is_no_number_is_not_logged(tmp_path, monkeypatch, process_group):
    with pytest.raises(RunError, match=r"notes.py:Text put 'high' into step.metrics\['word'\]: expected a number"):
        run(tmp_path, monkeypatch, "notes.py:Text", "data.val_files=null")


def test_one_may_end_the_run(tmp_path, monkeypatch, process_group):
    monkeypatch.setattr(interrupts, "_received", None)
    with pytest.raises(FileNotFoundError):  # it takes no notes
        run(tmp_path, monkeypatch, "notes.py:Stops", "data.val_files=null")
    assert list(whole_checkpoints(tmp_path / "run")) == [1]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("notes", "names no class: write module.Class, or file.py:Class"),
        ("notes.py:Note", 'unknown class in notes.py "Note": did you mean "Notes"?'),
        ("notes.py:Other", "is no subclass of verl_omni.trainer.callbacks.Callback"),
        ("notes.py:Misspelt", 'would never be called: unknown method "on_step_ended": did you mean "on_step_end"?'),
        ("notes.py:Asks", "is made without arguments, and wants path"),
        ("no.py:Notes", "there is no file no.py"),
        ("no_such_package.Notes", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("broken.py:Notes", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_one_is_refused_before_anything_starts(tmp_path, monkeypatch, spec, said):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "notes.py").write_text(NOTES)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError) as refused:
        callback_class(spec)
    assert str(refused.value).startswith("trainer.callbacks: ") and said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_module_on_the_path_is_one_too(tmp_path, monkeypatch):
    (tmp_path / "my_callbacks_module.py").write_text(NOTES)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert issubclass(callback_class("my_callbacks_module.Notes"), Callback)
