"""`verl-omni score`: a reward on images that are there."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from verl_omni.cli import score as command
from verl_omni.rewards.scorers.jpeg import jpeg_kilobytes

REWARD = """
def compute_score(image, prompt, ground_truth):
    if ground_truth == "broken":
        raise ValueError("cannot judge this")
    return {"score": image.getpixel((0, 0))[0] / 255, "seen": prompt}
"""


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for i, level in enumerate((51, 255, 102)):
        Image.new("RGB", (16, 16), (level, 0, 0)).save(tmp_path / "images" / f"{i}.png")
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path


def run(monkeypatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["score", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    return ended.value.code


def test_a_table_a_page_and_lines(images, monkeypatch, capsys):
    rewards = ["--function", "mine.py:compute_score", "--scorer", "jpeg_compressibility"]
    rewards += ["--set", "jpeg_compressibility.quality=50"]
    code = run(monkeypatch, *rewards, "images", "--prompt", "a <b>", "--json", "out.jsonl")
    assert code == 0
    lines = [json.loads(line) for line in (images / "out.jsonl").read_text().splitlines()]
    assert [line["compute_score"] for line in lines] == [
        {"score": level, "seen": "a <b>"} for level in (0.2, 1.0, pytest.approx(0.4))
    ]
    kilobytes = jpeg_kilobytes(Image.open(images / "images/0.png"), quality=50)
    assert lines[0]["jpeg_compressibility"] == {"score": -kilobytes}
    page = (images / "scores.html").read_text()
    assert page.count("data:image/png") == 3 and "a &lt;b&gt;" in page
    shown = capsys.readouterr().out
    assert "mean" in shown and shown.index("0.png") < shown.index("1.png")  # by the first scorer, which is jpeg's


def test_a_failure_is_shown_and_is_no_score(images, monkeypatch, capsys):
    (images / "truths.txt").write_text("fine\nbroken\nfine\n")
    code = run(monkeypatch, "--function", "mine.py", "images", "--ground-truths", "truths.txt")
    shown = capsys.readouterr()
    assert code == 1 and "1 of 3 scores failed" in shown.err
    assert "1.png          failed" in shown.out and "ValueError: cannot judge this" in shown.out
    assert "mean           0.3000" in shown.out


def test_a_runs_samples_and_pairs_of_them(images, monkeypatch):
    rows = [{"image": f"images/{i}.png", "prompt": "ab"[i // 2], "ground_truth": "x"} for i in range(3)]
    (images / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(monkeypatch, "--function", "mine.py", "--samples", "samples.jsonl", "--pairs", "p.jsonl") == 0
    (pair,) = [json.loads(line) for line in (images / "p.jsonl").read_text().splitlines()]
    assert pair["prompt"] == "a" and (pair["chosen_score"], pair["rejected_score"]) == (1.0, 0.2)
    from verl_omni.data.prepare_offline_dpo import read_pairs

    (read,) = read_pairs(images / "p.jsonl")
    assert read.chosen.name == "1.png" and read.rejected.name == "0.png"


BAD = {
    "no reward": (["images"], "say which reward: --scorer NAME"),
    "no images": (["--scorer", "ocr"], "say which images"),
    "unknown": (["--scorer", "ocrr", "images"], 'unknown reward (data_source) "ocrr"'),
    "setting": (["--scorer", "ocr", "--set", "ocr.thread=1", "images"], 'setting of reward.scorers.ocr "thread"'),
    "setting of none": (["--scorer", "ocr", "--set", "ocrr.n=1", "images"], "there is no --scorer ocrr"),
    "no setting": (["--scorer", "ocr", "--set", "threads", "images"], "expected SCORER.SETTING=VALUE"),
    "not there": (["--scorer", "ocr", "nowhere"], "nowhere is not there"),
    "lines": (["--function", "mine.py", "images", "--prompts", "mine.py"], "lines for 3 files: expected one for each"),
    "empty": (["--function", "mine.py", "empty"], "empty holds no image"),
    "no sample": (["--function", "mine.py", "--samples", "mine.py"], "mine.py, line 2 is no JSON: Expecting value"),
    "no pair": (["--function", "mine.py", "images/0.png", "--pairs", "p"], "there is no pair to write"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_one_line(images, monkeypatch, case):
    (images / "empty").mkdir()
    arguments, said = BAD[case]
    code = run(monkeypatch, *arguments)
    assert code.startswith("error: ") and said in code and "\n" not in code


def test_added_up_as_a_run_would(images, monkeypatch, capsys):
    """A gate that is closed for all but the first: 0.5 x 0.7 alone, by hand."""
    (images / "levels.py").write_text(
        "from verl_omni.rewards import register_reward\n\n"
        '@register_reward("test_level")\n'
        "def level(images, *_):\n    return [{'score': i.getpixel((0, 0))[0] / 255} for i in images]\n\n"
        '@register_reward("test_half")\n'
        "def half(images, *_):\n    return [{'score': 0.5} for _ in images]\n"
    )
    monkeypatch.syspath_prepend(images)
    scorers = "[{name: test_level, weight: 2}, {name: test_half, weight: 0.7, gate: {by: test_level, at_least: 0.9}}]"
    code = run(monkeypatch, "--scorers", scorers, "--external-lib", "levels", "images", "--json", "out.jsonl")
    from verl_omni.rewards import registry

    for name in ("test_level", "test_half"):
        registry._REWARDS._entries.pop(name)
    assert code == 0, capsys.readouterr()
    lines = [json.loads(line) for line in (images / "out.jsonl").read_text().splitlines()]
    assert [line["score"]["score"] for line in lines] == pytest.approx([0.4, 2.35, 0.8])
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["file", "score", "test_level", "test_half"]
    assert shown.index("1.png") < shown.index("2.png") < shown.index("0.png")


def test_the_page_shows_the_ground_truth_and_the_next_command_is_whole(images, monkeypatch, capsys):
    rows = [{"image": f"images/{i}.png", "prompt": "a", "ground_truth": "HALT"} for i in range(3)]
    (images / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(monkeypatch, "--function", "mine.py", "--samples", "samples.jsonl", "--pairs", "p.jsonl") == 0
    assert (images / "scores.html").read_text().count("<b>HALT</b>") == 3
    words = capsys.readouterr().out.split("verl-omni prepare-pairs ")[1].split()
    from verl_omni.data.pair_options import parser

    options = parser().parse_args(words)
    assert (options.data, options.height, options.width, options.resize) == ("p.jsonl", 16, 16, False)


def test_what_a_reward_compares_with_is_asked_for_at_once(images, monkeypatch):
    assert 'the reward "ocr_line" reads the ground truth, and images/0.png has none' in run(
        monkeypatch, "--scorer", "ocr_line", "images"
    )
    assert 'the reward "clip_score" reads the prompt' in run(monkeypatch, "--scorer", "clip_score", "images")


def test_the_grid_of_a_folder_that_sample_wrote_is_no_sample(images, monkeypatch, capsys):
    Image.new("RGB", (48, 16)).save(images / "images/grid.png")
    assert run(monkeypatch, "--function", "mine.py", "images", "--ground-truth", "x") == 0
    assert "grid.png" in capsys.readouterr().out  # somebody's own image of that name
    (images / "images/samples.jsonl").write_text("")
    assert run(monkeypatch, "--function", "mine.py", "images", "--ground-truth", "x") == 0
    assert "grid.png" not in capsys.readouterr().out


def test_nobody_who_tries_a_function_waits_for_verl():
    code = "import sys, verl_omni.rewards.by_hand; print(sorted({'ray', 'verl', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_texts_are_scored_and_shown(images, monkeypatch, capsys):
    (images / "length.py").write_text("def compute_score(text):\n    return float(len(text))\n")
    (images / "answer.txt").write_text("a <fox>")
    (images / "samples.jsonl").write_text(json.dumps({"kind": "text", "file": "answer.txt", "prompt": "who?"}) + "\n")
    assert run(monkeypatch, "--function", "length.py", "--samples", "samples.jsonl") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["answer.txt", "7.0000"]
    page = (images / "scores.html").read_text()
    assert "<blockquote>a &lt;fox&gt;</blockquote>" in page and "<img" not in page and "1 files, the best first" in page
