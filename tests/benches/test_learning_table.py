"""The table and the figure of learning, from curves whose answers are known."""

import json
import threading
import time
import xml.etree.ElementTree as ET

import pytest

from benchmarks import learning
from benchmarks.endings import best as best_ending
from benchmarks.endings import table as table_of_endings
from benchmarks.learning_table import (
    at,
    best,
    ending,
    figure,
    mean_at,
    read_all,
    read_curves,
    report,
    search,
    table,
    time_to,
    write_into,
)
from benchmarks.local_runs import Job, run_all


def curve(algorithm, slope, seed=0, lr=1e-4):
    points = [
        {"step": i, "images": 100 * i, "seconds": 10.0 * i, "score": 0.6 + slope * i, "second": 1 - 0.1 * i,
         "diversity": 0.2, "reward": 0.5}
        for i in range(4)
    ]  # fmt: skip
    told = {"device": "a card", "settings": [], "asked": 30.0, "whole": True, "task": "scenes"}
    return {"algorithm": algorithm, "lr": lr, "seed": seed, "points": points, **told}


@pytest.fixture
def folder(tmp_path):
    given = [curve("flow_grpo", 0.05), curve("awm", 0.1), curve("awm", 0.08, 1), curve("awm", 0.01, lr=1e-3)]
    for i, one in enumerate(given):
        (tmp_path / f"{i}.json").write_text(json.dumps(one))
    return tmp_path


def test_of_each_algorithm_the_best_learning_rate_counts(folder):
    curves = read_curves(folder, "scenes")
    assert [run["seed"] for run in curves["awm"]] == [0, 1] and curves["awm"][0]["lr"] == 1e-4


def test_what_was_searched_is_shown(folder):
    lines = search(read_all(folder, "scenes")).splitlines()
    assert lines[0] == "| algorithm | 0.0001 | 0.001 |"
    assert lines[2:] == ["| `awm` | .825 | .625 |", "| `flow_grpo` | .725 |  |"]


def test_a_run_that_was_killed_counts_unless_another_went_further(folder):
    for name, seed in (("crd", 0), ("awm", 2)):
        (folder / "runs" / name).mkdir(parents=True)
        cut = curve(name, 0.05, seed) | {"points": curve(name, 0.05)["points"][:2]}
        (folder / "runs" / name / "so_far.json").write_text(json.dumps(cut))
    curves = read_curves(folder, "scenes")
    assert [run["seed"] for run in curves["awm"]] == [0, 1] and len(curves["crd"][0]["points"]) == 2
    (folder / "crd.json").write_text(json.dumps(curve("crd", 0.05)))
    assert [len(run["points"]) for run in read_curves(folder, "scenes")["crd"]] == [4]


def test_after_the_deadline_no_run_is_started(tmp_path, capsys):
    job = Job(tmp_path / "never.json", dict, ())
    assert run_all([job], 1, deadline=time.monotonic() - 1) == [] and not job.file.exists()
    assert "not started for want of time: 1" in capsys.readouterr().err


def test_a_run_that_fails_says_why(tmp_path, capsys):
    """Also where it has threads that do not end."""
    with capsys.disabled():
        assert run_all([Job(tmp_path / "fails.json", fail, ())], 1) == [tmp_path / "fails.json"]
    assert "ValueError: no such thing" in (tmp_path / "fails.log").read_text()


def test_a_run_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.local_runs.GRACE", 0)
    job = Job(tmp_path / "hangs.json", threading.Event().wait, ())
    assert run_all([job], 1, deadline=time.monotonic() + 1) == [job.file]


def fail():
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("no such thing")


def test_between_two_validations_the_curve_is_straight(folder):
    run = curve("awm", 0.1)
    assert at(run, "seconds", 15.0) == pytest.approx(0.75) and at(run, "images", 301) is None
    assert ending(run) == pytest.approx(0.85)
    assert ending(run | {"points": run["points"][:2]}) == pytest.approx(0.7)  # the start is no ending
    assert mean_at([run, curve("awm", 0.0)], "images", 100) == pytest.approx(0.65)
    assert time_to([run], 0.75) == pytest.approx(15, abs=0.1) and time_to([run], 0.95) is None


def test_the_table_says_how_many_times_as_fast(folder):
    lines = table(read_curves(folder, "scenes")).splitlines()
    assert "| time to 0.7 | time to 0.75 | images to 0.75 |" in lines[0] and "0.8 |" not in lines[0]
    assert lines[2].startswith("| `awm` | 0.0001 | 2 | 100.0 | .600 | .825 (.800 to .850) |")
    assert "(1.8 ×)" in lines[2] and lines[3].startswith("| `flow_grpo`") and "(1 ×)" in lines[3]
    assert "1.000 → .700" in lines[2]


def test_what_is_missing_is_said_below_the_table(folder, tmp_path):
    curves = read_curves(folder, "scenes")
    assert best(curves) == ["awm", "flow_grpo"]
    told = report(curves, ["flow_grpo", "awm", "crd"])
    assert "Runs that are still missing: 2 of `flow_grpo`, 1 of `awm`, 2 of `crd`." in told and "Ended" not in told
    curves["awm"][0] |= {"whole": False, "settings": ["a=1"]}
    told = report(curves, [])
    assert "Ended before the 30 s that were asked for: `awm`." in told and "recipe: `a=1`." in told
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- LEARNING scenes -->\nold\n<!-- /LEARNING scenes -->\nafter\n")
    write_into(document, told, "scenes")
    assert document.read_text() == f"before\n<!-- LEARNING scenes -->\n{told}\n<!-- /LEARNING scenes -->\nafter\n"
    assert report({}, ["awm"]) == "No run has left a curve yet."


def test_a_table_is_of_one_task(folder, tmp_path):
    words = curve("flow_grpo", 0.1) | {"task": "words"}
    (tmp_path / "words.json").write_text(json.dumps(words))
    assert set(read_curves(folder, "scenes")) == {"flow_grpo", "awm"}
    curves = read_curves(folder, "words")
    assert curves == {"flow_grpo": [words]}
    assert "OCR .59 → .92" in table(curves) and "GenEval" in table(read_curves(folder, "scenes"))
    document = tmp_path / "page.md"
    before = "<!-- LEARNING scenes -->\nkept\n<!-- /LEARNING scenes -->\n"
    document.write_text(f"{before}<!-- LEARNING words -->\n<!-- /LEARNING words -->\n")
    write_into(document, "told", "words")
    assert document.read_text() == f"{before}<!-- LEARNING words -->\ntold\n<!-- /LEARNING words -->\n"


def test_drawing_in_8_bits_has_a_table_of_its_own(folder, tmp_path, capsys):
    document, figure_file = tmp_path / "page.md", tmp_path / "figure.svg"
    document.write_text("<!-- LEARNING scenes -->\n<!-- /LEARNING scenes -->\n")
    learning.show(folder, "scenes", figure_file, document)  # nobody has run it: no table, and no marks are needed
    (folder / "eight.json").write_text(json.dumps(curve("flow_grpo in 8 bits", 0.04)))
    marks = "<!-- LEARNING scenes in 8 bits -->\n<!-- /LEARNING scenes in 8 bits -->\n"
    document.write_text(document.read_text() + marks)
    learning.show(folder, "scenes", figure_file, document)
    main, eight = document.read_text().split("<!-- LEARNING scenes in 8 bits -->")
    assert "| `awm` |" in main and "flow_grpo in 8 bits" not in main + figure_file.read_text()
    assert "| `flow_grpo` |" in eight and "| `flow_grpo in 8 bits` |" in eight and "awm" not in eight
    assert "1 of `flow_grpo pool in 8 bits`" not in main and "of `flow_grpo pool in 8 bits`" in eight


def test_the_figure_has_a_line_for_each(folder):
    odd = curve("crd", 0.05)
    odd["points"][-1]["seconds"] = 30.006
    assert 30.006 * 60 / 60 > 30.006  # rounding leads beyond the end
    ET.fromstring(figure({"crd": [odd]}))
    root = ET.fromstring(figure(read_curves(folder, "scenes")))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    named = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert len(lines) == 2 and {"awm .825", "flow_grpo .725"} <= named


def test_of_the_endings_the_highest_is_chosen_and_its_fall_is_told():
    found = {"a": [{0: 0.4, 10: 0.8, 20: 0.7}, {0: 0.4, 10: 0.6, 20: 0.72}], "b": [{0: 0.4, 10: 0.7, 20: 0.75}] * 2}
    assert best_ending(found) == "b"
    assert table_of_endings(found).splitlines()[2:] == [
        "| a | 0.400 | 0.700 | 0.700 0.720 | 0.710 | 0.100 |",
        "| b | 0.400 | 0.700 | 0.750 0.750 | 0.750 | 0.000 |",
    ]


def test_a_run_that_a_deadline_cut_is_made_again(tmp_path):
    for name, told in (("cut", {"whole": False}), ("whole", {"whole": True}), ("of_another_kind", {})):
        (tmp_path / f"{name}.json").write_text(json.dumps(told))
    names = ("cut", "whole", "of_another_kind", "new")
    jobs = [Job(tmp_path / f"{name}.json", lambda: {"whole": True, "made": "now"}, ()) for name in names]
    assert run_all(jobs, 2) == []
    made = [job.file.stem for job in jobs if "made" in json.loads(job.file.read_text())]
    assert made == ["cut", "new"]


def test_a_run_of_which_more_is_asked_is_made_again(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"asked": 9.0}))
    jobs = [Job(tmp_path / "a.json", lambda: {"asked": 25.0}, (), asked) for asked in (9.0, 25.0, 10.0)]
    made = []
    for job in jobs:
        assert run_all([job], 1) == []
        made.append(json.loads(job.file.read_text())["asked"])
    assert made == [9.0, 25.0, 25.0]


def test_runs_from_two_generators_are_not_compared(folder, monkeypatch):
    other = curve("crd", 0.1)
    other["points"][0]["score"] = 0.5
    (folder / "another.json").write_text(json.dumps(other))
    monkeypatch.setattr("sys.argv", ["learning", "scenes", "--table", "--out", str(folder)])
    with pytest.raises(SystemExit, match=r"error: runs of scenes in .* began at \.500, \.600: each generator"):
        learning.main()


def test_a_run_of_few_steps_is_marked(folder):
    curves = read_curves(folder, "scenes")
    assert "little can be said: `flow_grpo` (3), `awm` (3)." in report(curves, [])
    for run in curves["awm"]:
        run["points"][-1]["step"] = 10
    assert "little can be said: `flow_grpo` (3)." in report(curves, [])
    assert "| `flow_grpo` | 0.0001 | 1 | 100.0 | .600 | .725 |" in table(curves)  # of one run no spread


def test_the_best_are_run_with_their_best_rate(folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(learning, "run_all", lambda jobs, *_: asked.extend(job.file.name for job in jobs) or [])
    monkeypatch.setattr(learning, "import_everything", lambda: None)
    (tmp_path / "empty").mkdir()
    given = ["learning", "scenes", "--model", str(tmp_path), "--seeds", "2", "--best", "1", "--out"]
    monkeypatch.setattr("sys.argv", [*given, str(folder)])
    learning.main()
    assert asked == ["awm_lr0.0001_seed2.json"]
    for wrong in ([str(tmp_path / "empty")], [str(folder), "--lr", "2e-5"]):
        monkeypatch.setattr("sys.argv", [*given, *wrong])
        with pytest.raises(SystemExit):
            learning.main()
    assert len(asked) == 1
