import importlib.util
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from verl_omni.data import PromptDataset

ROOT = Path(__file__).parents[2]
OCR = ROOT / "examples/flowgrpo_trainer/data_process/qwenimage_ocr.py"
DUMMY = ROOT / "tests/special_e2e/create_dummy_diffusion_data.py"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(path, *args):
    return subprocess.run([sys.executable, path, *map(str, args)], capture_output=True, text=True)


@pytest.mark.parametrize(
    "prompt, text",
    [
        ('A cafe menu with "Today’s Special" in chalk', "Today’s Special"),
        ("""A baker's van, "Joe's Bread", at dawn""", "Joe's Bread"),
        ('A board that reads "E=mc²".', "E=mc²"),
        ('A door marked "OPEN" beside one marked "CLOSED"', "OPEN CLOSED"),
        ("A poster “Grand Opening” on a wall", "Grand Opening"),
        ("A book titled „Die Welle“ on a desk", "Die Welle"),
        ('A page that says "He said “hi” and left"', "He said “hi” and left"),
        ('A page that says “He said "hi" and left”', 'He said "hi" and left'),
        ('A sign " Mind the Gap " underground', "Mind the Gap"),
    ],
)
def test_ground_truth_is_the_quoted_text(prompt, text):
    assert load(OCR).ground_truth(prompt) == text


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("A sign that reads 'STOP'", "no text in double quotes"),
        ('A 6" ruler on a desk', "without its partner"),
        ('A 6" ruler marked "cm"', "without its partner"),
        ('A blank sign ""', "no text in double quotes"),
        ('A sign "A" and a blank one ""', "an empty pair"),
    ],
)
def test_a_prompt_without_a_clear_text_is_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        load(OCR).ground_truth(prompt)


def test_folder_becomes_two_parquet_files_that_the_dataset_reads(tmp_path):
    (tmp_path / "train.txt").write_text('A sign "one"\n\nA "two" sign\r\n', encoding="utf-8")
    (tmp_path / "test.txt").write_text('\ufeffA sign "three"', encoding="utf-8")
    done = run(OCR, "--input", tmp_path, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    train, test = (PromptDataset(tmp_path / "out" / f"{split}.parquet") for split in ("train", "test"))
    assert [item["prompt"] for item in train] == ['A sign "one"', 'A "two" sign']
    assert [item["reward_model"]["ground_truth"] for item in train] == ["one", "two"]
    assert (test[0]["prompt"], test[0]["data_source"], test[0]["negative_prompt"]) == ('A sign "three"', "ocr", " ")
    assert test[0]["extra_info"] == {"split": "test", "index": 0}
    assert [m["role"] for m in train[0]["raw_prompt"]] == ["user"]


def test_holdout_splits_one_file_without_loss_or_overlap(tmp_path):
    lines = [f'A sign "{i}"' for i in range(20)]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    for _ in range(2):
        assert run(OCR, "--input", tmp_path / "all.txt", "--output", tmp_path, "--holdout", 6).returncode == 0
        parts = [[i["prompt"] for i in PromptDataset(tmp_path / f"{s}.parquet")] for s in ("train", "test")]
        assert [len(p) for p in parts] == [14, 6]
        assert sorted(parts[0] + parts[1]) == sorted(lines)


def test_a_bad_line_stops_with_its_number_or_is_left_out_and_counted(tmp_path):
    (tmp_path / "p.txt").write_text('A sign "one"\nA sign\nA sign "two"\n')
    out = tmp_path / "out"
    stopped = run(OCR, "--input", tmp_path / "p.txt", "--output", out)
    assert stopped.returncode == 1 and not out.exists()
    assert stopped.stderr.startswith("error: ") and "p.txt, line 2: no text in double quotes" in stopped.stderr
    assert stopped.stderr.count("\n") == 1
    skipped = run(OCR, "--input", tmp_path / "p.txt", "--output", out, "--skip-bad")
    assert skipped.returncode == 0 and "p.txt: 1 lines left out" in skipped.stderr
    assert [i["reward_model"]["ground_truth"] for i in PromptDataset(out / "train.parquet")] == ["one", "two"]


@pytest.mark.parametrize(
    "name, text, extra, message",
    [
        ("gone.txt", None, [], "no such file or folder"),
        ("empty.txt", "\n", [], "has no prompts"),
        ("one.txt", 'A sign "x"', ["--holdout", "1"], "has 1 prompts, give 0 to 0"),
        (".", None, [], "has no train.txt and no test.txt"),
        (".", None, ["--holdout", "2"], "--holdout is for a single file"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, name, text, extra, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as error:
        load(OCR).main(["--input", str(tmp_path / name), "--output", str(tmp_path / "out"), *extra])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_dummy_data_is_small_seeded_and_readable(tmp_path):
    def make(name, *args):
        done = run(DUMMY, "--output", tmp_path / name, *args)
        assert done.returncode == 0, done.stderr
        return [pq.read_table(tmp_path / name / f"{split}.parquet").to_pylist() for split in ("train", "test")]

    first = make("a", "--num-prompts", 5, "--num-test-prompts", 2)
    assert [len(rows) for rows in first] == [5, 2]
    assert first == make("b", "--num-prompts", 5, "--num-test-prompts", 2)
    assert first != make("c", "--num-prompts", 5, "--num-test-prompts", 2, "--seed", 1)
    item = PromptDataset(tmp_path / "a" / "train.parquet")[0]
    assert item["data_source"] == "jpeg_compressibility"
    assert f'"{item["reward_model"]["ground_truth"]}"' in item["prompt"]
    assert make("d", "--data-source", "ocr")[0][0]["data_source"] == "ocr"
    assert run(DUMMY, "--output", tmp_path / "e", "--num-prompts", 0).returncode == 1


def test_a_misspelt_field_of_geneval_is_named(tmp_path):
    good = '{"tag": "counting", "include": [{"class": "clock", "count": 2}], "prompt": "two clocks"}'
    (tmp_path / "a.jsonl").write_text(good + "\n" + good.replace("prompt", "prommpt"))
    script = ROOT / "examples/flowgrpo_trainer/data_process/geneval.py"
    done = run(script, "--train", tmp_path / "a.jsonl", "--test", tmp_path / "a.jsonl", "--output", tmp_path / "out")
    assert done.returncode == 1 and 'a.jsonl, line 2: there is no "prompt". Did you mean "prommpt"?' in done.stderr
