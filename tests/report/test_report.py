import base64
import io
import json
import os
import platform
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

import verl_omni
from verl_omni.report.assets import WEB
from verl_omni.report.charts import MOST_POINTS, Series, as_script, line_chart, stacked_bars, thinned
from verl_omni.report.galleries import MAX_PAIRS, OPEN_PAIRS
from verl_omni.report.report import Run, format_before_after_table, main, write_report
from verl_omni.report.starts import code_commit, commit, note_start, read_starts


class Collector(HTMLParser):
    """Text, images and every reference of a page; raises where tags do not close."""

    VOID = {"meta", "img", "br"}

    def __init__(self, page: str):
        super().__init__()
        self.open, self.texts, self.images, self.links, self.data = [], [], [], [], None
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "img":
            self.images.append(attrs["src"])
        self.links += [v for k, v in attrs.items() if k in ("src", "href") and not v.startswith("data:")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.data = json.loads(data) if self.data is None else self.data  # what is drawn comes before what draws it
        elif self.open[-1:] != ["style"]:
            self.texts.append(data)

    def curve(self, heading: str, label: str) -> dict[float, float]:
        """Of a chart that the page draws."""
        (chart,) = (chart for chart in self.data if chart["heading"] == heading)
        return next(dict(map(tuple, one["points"])) for one in chart["series"] if one["label"] == label)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def test_numbers_of_the_run_land_in_the_page(run_dir):
    path = write_report(run_dir, title="Signs & numbers", continue_command="verl-omni trainer.total_training_steps=40")
    assert path == run_dir / "report.html"
    page = Collector(path.read_text())
    text = page.text
    assert "Signs & numbers" in text
    assert "validation reward (ocr) 0.544 → 0.900" in text and "+0.356, step 0 to 6" in text
    assert "validation exact (ocr) 0.170 → 0.600" in text
    assert "training reward 0.550 → 0.800" in text
    assert "6 steps · 1 min 0 s of training · 576 images scored" in text
    assert "verl-omni trainer.total_training_steps=40" in text
    assert "note: <b>not bold</b>" in text
    assert page.curve("Reward", "training")[4] == 0.7
    assert page.curve("Reward", "validation reward (ocr)") == {0: 0.544, 3: 0.75, 6: 0.9}
    assert page.curve("Clip fraction", "actor/pg_clipfrac")[2] == 0.125
    seconds = {part: page.curve("Seconds of each step", part) for part in ("gen", "other", "testing")}
    assert seconds["gen"][1] == 4 and seconds["other"][1] == 2.5 and seconds["testing"][3] == 2


def test_page_needs_nothing_from_outside(run_dir):
    page = write_report(run_dir).read_text()
    assert Collector(page).links == []
    library = (WEB / "uPlot.iife.min.js").read_text()
    notice = library.splitlines()[0]
    assert library in page and "MIT License" in (WEB / "uPlot.LICENSE").read_text()
    own = page.replace(notice, "")
    assert "http" not in own and "@import" not in own and "url(" not in own and "fetch(" not in own


def test_pairs_show_first_and_last_validation_side_by_side(run_dir):
    page = Collector(write_report(run_dir).read_text())
    assert len(page.images) == 8
    first, last = (Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))) for uri in page.images[:2])
    # Step 10 comes after step 3 although "step_10" sorts before it.
    assert first.getpixel((0, 0)) == (0, 0, 200) and last.getpixel((0, 0)) == (200, 0, 200)
    assert 'a sign that reads "402" 0.25 ocr text: read0-2 exact: 0 1.00 ocr text: read10-2 exact: 1' in page.text
    assert "read3-0" not in page.text


def test_images_come_before_curves(run_dir):
    text = write_report(run_dir).read_text()
    assert text.index("<h2>Before and after</h2>") < text.index("<h2>Learning</h2>") and " more</summary>" not in text


def test_large_images_become_thumbnails_and_not_all_are_shown(run_dir):
    for step in (0, 10):
        folder = run_dir / "validation" / f"step_{step}"
        Image.new("RGB", (1024, 512), "gray").save(folder / "00000.png")
        sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
        (folder / "samples.jsonl").write_text(
            "".join(json.dumps(sample | {"index": i}) + "\n" for i in range(MAX_PAIRS + 5))
        )
    text = write_report(run_dir).read_text()
    page = Collector(text)
    assert len(page.images) == 2 * MAX_PAIRS
    assert f"<summary>{MAX_PAIRS - OPEN_PAIRS} more</summary>" in text
    assert Image.open(io.BytesIO(base64.b64decode(page.images[0].split(",")[1]))).size == (256, 128)


def test_what_a_run_lacks_is_left_out_or_said(run_dir):
    page = Collector(write_report(run_dir, out_path=run_dir / "else" / "page.html").read_text()).text
    assert "KL to the reference" not in page
    assert "Gradient norm" not in page, "null is not a number"
    assert "Go on from here" not in page
    (run_dir / "config.yaml").unlink()
    for file in run_dir.glob("validation/*/samples.jsonl"):
        file.unlink()
    page = Collector(write_report(run_dir).read_text()).text
    assert "Config" not in page and "Before and after" not in page


def edit(path: Path, change) -> None:
    """Rewrite the lines of a JSON-lines file."""
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_made_the_run_is_said(run_dir):
    (run_dir / "config.yaml").write_text(
        "recipe: Signs & numbers\n"
        "actor_rollout_ref: {model: {path: /models/Qwen-Image, algorithm: flow_grpo}, rollout: {seed: 7}}\n"
        "data: {train_files: [a.parquet, b.parquet], val_files: null, seed: 3}\n"
        "reward: {custom_reward_function: {path: mine.py, name: judge}}\n"
        "trainer: {seed: 0}\n"
    )
    note_start(run_dir, 0, "python -m verl_omni.trainer.main_diffusion recipe=<x>")
    note_start(run_dir, 3, None)
    text = Collector(write_report(run_dir).read_text()).text
    assert "Signs & numbers" in text and "Model /models/Qwen-Image" in text and "Algorithm flow_grpo" in text
    assert "Training data ['a.parquet', 'b.parquet']" in text and "Validation data" not in text
    assert "Reward judge in mine.py" in text and "trainer.seed=0, data.seed=3, actor_rollout_ref.rollout.seed=7" in text
    first, second = read_starts(run_dir)
    for start in (first, second):
        assert f"Started at step {start['step']} {start['date']}, verl-omni {verl_omni.__version__}" in text
        assert start["machine"] in text
    assert platform.node() in first["machine"] and f"{os.cpu_count()} cores" in first["machine"]
    (run_dir / "starts.jsonl").write_text(json.dumps(first) + "\n")
    assert "main_diffusion recipe=<x>" in Collector(write_report(run_dir).read_text()).text


def git(folder: Path, *arguments: str) -> str:
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_of_the_code_itself_is_noted(run_dir, tmp_path, monkeypatch):
    """Of its own checkout, not of one that an environment lies in; a package that pip took from git says it too."""
    checkout = tmp_path / "checkout"
    code, installed = checkout / "verl_omni/__init__.py", checkout / ".venv/lib/verl_omni/__init__.py"
    for file in (code, installed):
        file.parent.mkdir(parents=True)
        file.touch()
    git(tmp_path, "init", "-q", "checkout")
    git(checkout, "add", "verl_omni")
    git(checkout, "commit", "-qm", "one")
    head = git(checkout, "rev-parse", "HEAD")[:12]
    assert code_commit(code) == head and code_commit(installed) is None
    origin = {"url": "of a repository", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}
    files = {"direct_url.json": json.dumps(origin)}
    pip = type("", (), {"read_text": lambda self, name: files.get(name), "version": verl_omni.__version__})
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: pip())
    assert code_commit(installed) == "0123456789ab"
    monkeypatch.setattr(verl_omni, "__file__", str(code))
    note_start(run_dir, 7, None)
    assert read_starts(run_dir)[-1]["code"] == head
    assert f"verl-omni {verl_omni.__version__} at {head}" in Collector(write_report(run_dir).read_text()).text


def test_pairs_are_not_scored_images(tmp_path):
    data = {"actor/implicit_accuracy": 0.5, "actor/implicit_margin": 0.1, "perf/total_num_images": 8}
    lines = [{"step": step, "data": data} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = Collector(write_report(tmp_path).read_text()).text
    assert "16 images of pairs" in text and "scored" not in text
    assert "Pairs whose chosen image the model prefers" in text and "Margin of the chosen image" in text


def test_before_and_after_are_of_the_same_prompts_where_scores_failed(run_dir):
    """Scores .25 at first and 1 later; the third prompt, whose 0 would count at first only, has none at the end."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] <= 3]
    lines[-1]["data"]["val-aux/ocr/failed"] = 1.0
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, score in ((0, 0.0), (3, None)):
        path = run_dir / f"validation/step_{step}/samples.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[2]["score"] = score
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = format_before_after_table(run_dir).splitlines()
    row = next(line for line in table if "3 prompts scored both times" in line)
    assert row.split()[-3:] == ["0.250", "1.000", "+0.750"]
    assert "1 scores of validation failed" in Collector(write_report(run_dir).read_text()).text


def test_of_several_sources_each_is_compared_on_its_own_prompts(run_dir):
    """Prompts 0 and 1 are of `a`, where one failed at the end, 2 and 3 of `b`, where all have scores."""
    names = [f"val-core/{source}/reward/mean@1" for source in "ab"]
    first, last = dict.fromkeys(names, 0.5), {names[0]: 1.0, names[1]: 0.75, "val-aux/a/failed": 1.0}
    lines = [{"step": 0, "data": first}, {"step": 3, "data": last}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, scores in ((0, (0.9, 0.1, 0.5, 0.5)), (3, (None, 1.0, 0.5, 1.0))):
        edit(
            run_dir / f"validation/step_{step}/samples.jsonl",
            lambda row, scores=scores: row | {"score": scores[row["index"]], "data_source": "aabb"[row["index"]]},
        )
    of_a, of_b = Run(run_dir).changes()
    assert (of_a.label, of_a.before, of_a.after) == ("validation reward (a), 1 prompts scored both times", 0.1, 1.0)
    assert (of_b.label, of_b.before, of_b.after) == ("validation reward (b)", 0.5, 0.75)
    for step in (0, 3):  # none was kept
        (run_dir / f"validation/step_{step}/samples.jsonl").unlink()
    of_a, _ = Run(run_dir).changes()
    assert of_a.label == "validation reward (a), not of the same prompts as some scores failed"


def test_other_numbers_of_a_reward_are_compared_on_the_same_prompts_too(run_dir):
    """The length of the third prompt, 90, counts at first only; what nobody kept a prompt's own number of says so."""
    names = [f"val-aux/ocr/{name}/mean@1" for name in ("length", "mean_of_tags")]
    first, last = dict.fromkeys(names, 24.0), dict.fromkeys(names, 4.0) | {"val-aux/ocr/failed": 1.0}
    lines = [{"step": 0, "data": first | {"val-core/ocr/reward/mean@1": 0.5}}, {"step": 3, "data": last}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, lengths in ((0, (1, 2, 90, 3)), (3, (3, 4, None, 5))):
        edit(
            run_dir / f"validation/step_{step}/samples.jsonl",
            lambda row, lengths=lengths: row
            | {"score": None if lengths[row["index"]] is None else 0.5}
            | {"reward_extra_info": {} if lengths[row["index"]] is None else {"length": lengths[row["index"]]}},
        )
    changes = {change.label.split(",")[0]: change for change in Run(run_dir).changes()}
    length = changes["validation length (ocr)"]
    assert (length.label, length.before, length.after) == ("validation length (ocr), 3 prompts scored both times", 2, 4)
    assert "not of the same prompts as some scores failed" in changes["validation mean_of_tags (ocr)"].label


def test_the_users_commit_is_noted(tmp_path):
    git(tmp_path, "--version")
    assert commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert commit(tmp_path) is None, "nothing was committed"
    (tmp_path / "reward.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit(tmp_path) == head[:12]
    (tmp_path / "reward.py").write_text("a = 2\n")
    assert commit(tmp_path) == head[:12] + "+"


def test_colours_follow_the_scores_of_the_run_whatever_their_range(run_dir):
    for step, scores in ((0, (-90.0, -70.0, -80.0, -85.0)), (10, (-60.0, -50.0, -70.0, -75.0))):
        edit(
            run_dir / f"validation/step_{step}/samples.jsonl",
            lambda line, scores=scores: line | {"score": scores[line["index"]]},
        )
    page = write_report(run_dir).read_text()
    assert [float(x) for x in re.findall(r"--good:([\d.]+)", page)][:4] == [0.0, 0.75, 0.5, 1.0]
    assert "from the lowest score here (-90.000) to the highest (-50.000)" in page
    for step in (0, 10):
        edit(run_dir / f"validation/step_{step}/samples.jsonl", lambda line: line | {"score": 3e-6})
    page = write_report(run_dir).read_text()
    assert set(re.findall(r"--good:([\d.]+)", page)) == {"0.50"} and ">3e-06<" in page


def test_the_spread_within_groups_is_drawn(run_dir):
    spread = {"critic/rewards/std_mean": 0.125, "critic/rewards/zero_std_ratio": 0.5, "critic/diversity": 0.2}
    edit(run_dir / "metrics.jsonl", lambda line: line | {"data": line["data"] | spread})
    page = Collector(write_report(run_dir).read_text())
    assert page.curve("Reward's standard deviation in a group", "critic/rewards/std_mean")[2] == 0.125
    assert page.curve("Groups whose rewards are all equal", "critic/rewards/zero_std_ratio")[2] == 0.5
    assert page.curve("Distance of a prompt's images", "critic/diversity")[2] == 0.2


def test_a_run_without_rewards_and_one_with_a_single_validation(run_dir):
    """Offline training has no rewards; a validation alone has nothing to compare with."""
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "data": {"timing_s/step": 1.0, "actor/grad_norm": 1e-13}}\n')
    for step in (0, 3):
        (run_dir / f"validation/step_{step}/samples.jsonl").unlink()
    page = Collector(write_report(run_dir).read_text())
    assert "Gradient norm" in page.text and "Reward" not in page.text and "Before and after" not in page.text
    assert "Validation The first 4 validation prompts, with the same seeds, at step 10." in page.text
    assert len(page.images) == 4
    (run_dir / "metrics.jsonl").write_text('{"step": 0, "data": {"x": 1.0}}\n')
    assert "Learning" not in Collector(write_report(run_dir).read_text()).text


def test_small_numbers_keep_the_digits_that_count(run_dir):
    edit(run_dir / "metrics.jsonl", lambda line: line | {"data": {k: v and v * 1e-5 for k, v in line["data"].items()}})
    assert format_before_after_table(run_dir).splitlines()[2].split()[-3:] == ["5.44e-06", "9e-06", "+3.56e-06"]
    assert "training reward 5.5e-06 → 8e-06" in Collector(write_report(run_dir).read_text()).text


def test_table_for_the_console(run_dir):
    assert format_before_after_table(run_dir).splitlines() == [
        "                         before  after  change",
        "----------------------------------------------",
        "validation reward (ocr)   0.544  0.900  +0.356",
        "validation exact (ocr)    0.170  0.600  +0.430",
        "training reward           0.550  0.800  +0.250",
    ]


def test_a_folder_that_is_no_run_gets_one_clear_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run folder: it has no metrics.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has not logged a step"):
        Run(tmp_path)


def test_a_curve_keeps_its_points_and_a_long_one_its_spikes():
    chart = line_chart("a", [Series("few", [(0, 1 / 3), (5, 2.0)]), Series("none", [])])
    assert [(one["label"], one["points"]) for one in chart["series"]] == [("few", [[0, 0.333333], [5, 2.0]])]
    long = [(step, 1.0) for step in range(30_001)]
    long[12_345] = (12_345, 9.0)
    long[12_346] = (12_346, -9.0)
    kept = thinned(long)
    assert len(kept) <= MOST_POINTS and {(12_345, 9.0), (12_346, -9.0)} <= set(kept)
    assert kept == sorted(kept) and kept[0][0] == 0 and kept[-1][0] == 30_000


def test_bars_have_a_part_of_every_step():
    chart = stacked_bars("seconds", [1, 2], {"a": [1.0, 2.0], "b": [3.0, 1.0]})
    assert [one["points"] for one in chart["series"]] == [[[1, 1.0], [2, 2.0]], [[1, 3.0], [2, 1.0]]]


def test_no_name_can_end_the_script_that_holds_it():
    script = as_script([line_chart("</script><script>alert(1)</script>", [])])
    assert script.count("<") == 2 and json.loads(script.split(">", 1)[1].rsplit("<", 1)[0])[0]["heading"][0] == "<"


# ---- a run of somebody else --------------------------------------------------------------------------------


def with_image(run_dir, name):
    """The first image of the last validation is another; what the page and the console say then."""
    edit(run_dir / "validation/step_10/samples.jsonl", lambda row: row | ({} if row["index"] else {"image": name}))
    return Collector(write_report(run_dir).read_text())


@pytest.mark.parametrize("way", ["absolute", "upwards", "link"])
def test_only_images_of_the_run_are_in_its_page(run_dir, tmp_path_factory, capsys, way):
    """A page is passed on. Who sends a run to be looked at must not get pictures of the reader back."""
    private = tmp_path_factory.mktemp("home") / "private.png"
    Image.new("RGB", (8, 8), (1, 2, 3)).save(private)
    folder = run_dir / "validation/step_10"
    (folder / "link.png").symlink_to(private)
    names = {"absolute": str(private), "upwards": os.path.relpath(private, folder), "link": "link.png"}
    page = with_image(run_dir, names[way])
    assert len(page.images) == 7 and "lies outside" in page.text
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{folder / 'samples.jsonl'}: " in said and "lies outside" in said


@pytest.mark.parametrize("content", [b"", b"no image", b"GIF89a", None])
@pytest.mark.parametrize("ending", ["png", "gif"])
def test_a_picture_that_is_none_is_named_in_its_place(run_dir, capsys, content, ending):
    path = run_dir / f"validation/step_10/x.{ending}"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    page = with_image(run_dir, path.name)
    assert len(page.images) == 7 and str(path) in page.text
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(path) in said


DEEP = "[" * 100_000 + "]" * 100_000
BROKEN = {
    "metrics.jsonl": [DEEP + "\n", '{"step": 1}\n', '{"step": "1", "data": {}}\n', "[]\n"],
    "config.yaml": [DEEP, "a: [", "- 1\n"],
    "starts.jsonl": ['{"a": ' + DEEP + "}\n"],
    "validation/step_10/samples.jsonl": [
        *(DEEP, "{}", '{"index": 0, "image": 1}', '{"index": 0, "image": "x", "score": "1"}')
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_a_file_that_no_run_writes_is_one_line(run_dir, monkeypatch, capsys, name, text):
    (run_dir / name).write_text(text)
    monkeypatch.setattr("sys.argv", ["report", str(run_dir)])
    with pytest.raises(SystemExit):
        main()
    line = capsys.readouterr().err.splitlines()[-1]
    assert str(run_dir / name) in line and len(line) < 500
