"""`verl-omni eval`: two sets of weights on the same prompts and seeds."""

import json
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_checkpoint

from verl_omni.cli import eval as command
from verl_omni.cli.eval import comparison
from verl_omni.rewards.by_hand import Sample
from verl_omni.rewards.reward_function import RewardError


def run(monkeypatch, *arguments) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["verl-omni eval", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    return ended.value.code


def test_a_model_and_what_a_run_made_of_it(tiny_run, tmp_path, monkeypatch, capsys):
    own = tiny_run.parent / "mine.py"
    code = run(monkeypatch, tiny_checkpoint(), tiny_run, "--prompts", tiny_run.parent / "prompts.txt", "--seeds", 5, 6,
               "--function", own, "--scorer", "jpeg_compressibility", "--scorer-set", "jpeg_compressibility.quality=50",
               "--out", tmp_path)  # fmt: skip
    assert code == 0
    head, *rows = capsys.readouterr().out.splitlines()[:3]
    assert head.split()[-4:] == ["difference", "second", "wins", "images"] and "step 2" in head
    assert [row.split()[0] for row in rows] == ["jpeg_compressibility", "compute_score"]
    assert all(row.split()[-1] == "6" for row in rows)
    page = (tmp_path / "eval.html").read_text()
    assert page.count("data:image/png") == 12 and page.count('class="pair"') == 6
    lines = [json.loads(line) for line in (tmp_path / "images_2/samples.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["seed"]) for line in lines[:3]] == [("a cat", 5), ("a cat", 6), ("a dog", 5)]


def scored(*scores) -> list[Sample]:
    failed = RewardError("no")
    return [Sample(Path("x"), answers={"r": failed if s is None else {"score": s}}) for s in scores]


def test_the_table_by_hand():
    """Differences 1, 0, -1 and 3 of the images that both have a score of; a tie is half a win."""
    first, second = scored(0, 1, 2, 1, 5), scored(1, 1, 1, 4, None)
    head, row = comparison([first, second], ["a", "b"], ["r"]).splitlines()
    assert row.split() == ["r", "1.0000", "1.7500", "+0.7500", "±", "0.8539", "62%", "4"]
    assert comparison([second], ["b"], ["r"]).splitlines()[1].split() == ["r", "1.7500", "4"]
    assert comparison([scored(None)], ["b"], ["r"]).splitlines()[1].split() == ["r", "-", "0"]


@pytest.mark.parametrize(
    "more, line",
    [
        ([], "say which reward: --scorer NAME"),
        (["--scorer", "ocr_line"], 'the reward "ocr_line" reads the ground truth, and the prompt "a cat" has none'),
        (["--scorer", "ocrr"], 'unknown reward (data_source) "ocrr"'),
    ],
)
def test_mistakes_are_one_line(tiny_run, tmp_path, monkeypatch, more, line):
    said = run(monkeypatch, tiny_run, "--prompt", "a cat", "--out", tmp_path, *more)
    assert said.startswith("error: ") and line in said and "\n" not in said
