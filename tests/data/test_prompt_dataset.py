import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from verl import DataProto

from verl_omni.data import PromptDataset, create_val_dataloader


def row(prompt="a sign that reads “407”", **changes):
    return {
        "data_source": "ocr",
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": "407"},
        "extra_info": {"split": "train"},
    } | changes


def messages(text, *before):
    return [*before, {"role": "user", "content": text}]


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_text_and_messages_give_the_same_item(tmp_path, suffix):
    system = {"role": "system", "content": "Describe the image."}
    prompts = {"text": "a sign", "user": messages("a sign"), "system": messages("a sign", system)}
    for name, prompt in prompts.items():
        item = PromptDataset(write(tmp_path / f"{name}{suffix}", [row(prompt)]))[0]
        assert item["prompt"] == "a sign"
        assert item["raw_prompt"] == (messages("a sign") if name == "text" else prompt)
        assert item["negative_prompt"] == ""
        assert item["reward_model"]["ground_truth"] == "407"
        assert item["extra_info"] == {"split": "train"}


def test_files_are_joined_in_order_and_numbered_through(tmp_path):
    files = [
        write(tmp_path / "a.parquet", [row(f"a{i}", negative_prompt="blurry") for i in range(3)]),
        write(tmp_path / "b.jsonl", [row(messages(f"b{i}"), images=[f"{i}.png"]) for i in range(2)]),
    ]
    data = PromptDataset([str(f) for f in files])
    assert [item["prompt"] for item in data] == ["a0", "a1", "a2", "b0", "b1"]
    assert [item["index"] for item in data] == list(range(5))
    assert [item["negative_prompt"] for item in data] == ["blurry"] * 3 + [""] * 2
    assert [item["images"] for item in data] == [None] * 3 + [["0.png"], ["1.png"]]
    assert len({tuple(sorted(item)) for item in data}) == 1  # a batch needs the same keys in every row


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_other_columns_are_handed_on_in_extra_info(tmp_path, suffix):
    """Whatever their names: none of them may pass for a field that the run itself sets."""
    others = {"difficulty": 3, "server": 7, "seed": "x", "uid": "u", "sample_id": 1, "index": 9, "raw_prompt": "raw"}
    rows = [row(**others, extra_info={"split": "train", "difficulty": "hard"}, agent_name="mine")]
    (item,) = PromptDataset(write(tmp_path / f"a{suffix}", rows))
    assert item["extra_info"] == others | {"split": "train", "difficulty": "hard"}
    assert (item["agent_name"], item["index"], item["raw_prompt"]) == ("mine", 0, messages("a sign that reads “407”"))
    assert not {"server", "seed", "uid", "sample_id", "difficulty"} & item.keys()


def test_prompt_key_and_max_samples(tmp_path):
    rows = [{k: v for k, v in row().items() if k != "prompt"} | {"caption": f"c{i}"} for i in range(4)]
    file = write(tmp_path / "a.parquet", rows)
    data = PromptDataset(file, {"prompt_key": "caption"}, max_samples=2)
    assert [item["prompt"] for item in data] == ["c0", "c1"]
    assert len(PromptDataset(file, {"prompt_key": "caption"}, max_samples=99)) == 4
    with pytest.raises(ValueError, match="is 0: give 1 or more"):
        PromptDataset(file, {"prompt_key": "caption"}, max_samples=0)


def test_a_batch_becomes_a_dataproto_and_back(tmp_path):
    data = PromptDataset(write(tmp_path / "a.parquet", [row(messages(f"p{i}")) for i in range(5)]))
    batches = [DataProto.from_single_dict(b) for b in create_val_dataloader(data, batch_size=3)]
    assert [len(b) for b in batches] == [3, 2]
    assert [p for b in batches for p in b.non_tensor_batch["prompt"]] == [f"p{i}" for i in range(5)]
    array = batches[0].non_tensor_batch["raw_prompt"]
    assert isinstance(array, np.ndarray) and array.dtype == object and array.shape == (3,)
    assert batches[0].repeat(2, interleave=True).non_tensor_batch["index"].tolist() == [0, 0, 1, 1, 2, 2]


def without(name):
    return {k: v for k, v in row().items() if k != name}


BAD_ROWS = [
    (without("prompt"), 'has no column "prompt". Columns there: data_source, reward_model, extra_info'),
    (without("prompt") | {"promt": "x"}, 'Did you mean "promt"?'),
    (without("reward_model") | {"reward_modle": {"style": "x"}}, 'has a column "reward_modle": is it "reward_model"?'),
    (without("data_source") | {"data_sorce": "ocr"}, 'has a column "data_sorce": is it "data_source"?'),
    (without("reward_model") | {"ground_truth": None}, "ground_truth is missing"),
    (row(data_source=""), "data_source is missing"),
    (row(3), "prompt: a prompt is a text or a list of messages"),
    (row([1, 2]), "not [1, 2]"),
    (row([{"role": "user"}]), "list of messages"),
    (row([{"role": "system", "content": "x"}]), "need one user turn"),
    (row(messages("b", *messages("a"))), "the roles here are: user, user"),
    (row(messages(5)), "the content of a message is a text or a list of parts, not 5"),
    (row("  "), "prompt is empty"),
    (row(messages("")), "prompt is empty"),
    (row("x" * 2_000_000), "prompt has 2000000 letters: expected at most 100000"),
    (row("a cat", negative_prompt="x" * 100_001), "negative_prompt has 100001 letters: expected at most 100000"),
    (row(negative_prompt=7), "negative_prompt: a prompt is a text"),
    (row(reward_model={"style": "rule"}), "reward_model has no ground_truth"),
    (row(reward_model="407"), "reward_model has no ground_truth"),
]


@pytest.mark.parametrize("suffix, place", [(".parquet", "row 1"), (".jsonl", "line 1")])
@pytest.mark.parametrize("bad, message", BAD_ROWS)
def test_a_bad_row_is_named_in_one_line(tmp_path, bad, message, suffix, place):
    file = write(tmp_path / f"a{suffix}", [bad])
    with pytest.raises(ValueError) as error:
        PromptDataset(file)
    assert message in str(error.value)
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)
    if "column" not in message and "Did you mean" not in message:
        assert place in str(error.value)


def test_a_bad_row_is_found_behind_good_ones_and_blank_lines(tmp_path):
    lines = [json.dumps(row()), "", json.dumps(row("")), ""]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: prompt is empty"):
        PromptDataset(tmp_path / "a.jsonl")
    many = [row(messages("x"))] * 2500 + [row(messages(" "))]
    with pytest.raises(ValueError, match=r"a\.parquet, row 2501: prompt is empty"):
        PromptDataset(write(tmp_path / "a.parquet", many))


def test_empty_ground_truth_is_allowed(tmp_path):
    reward = {"style": "rule", "ground_truth": ""}
    assert PromptDataset(write(tmp_path / "a.parquet", [row(reward_model=reward)]))[0]["reward_model"] == reward


def test_missing_and_unreadable_files(tmp_path):
    def error(path, kind=ValueError):
        with pytest.raises(kind) as caught:
            PromptDataset(path, key="data.val_files")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    gone = error(tmp_path / "gone.parquet", FileNotFoundError)
    assert gone.startswith(f"no such file: {tmp_path}/gone.parquet") and "data.val_files=" in gone
    assert "no prompts given: set data.val_files=" in error([])
    assert "no prompts given" in error(None)
    assert "is a folder" in error(tmp_path)

    (tmp_path / "a.csv").write_text("prompt\n")
    assert 'files of type ".csv" are not read; data.val_files takes .parquet, .jsonl, .txt' in error(tmp_path / "a.csv")
    for name in ("a.parquet", "a.jsonl"):
        (tmp_path / name).write_text("")
        assert "is empty" in error(tmp_path / name)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert "is empty" in error(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_text("not parquet")
    assert "a.parquet is not a readable parquet file" in error(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    assert "a.jsonl, line 2 is no JSON" in error(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('["x"]\n')
    assert "line 1 holds a list: expected a JSON object" in error(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "text in UTF-8" in error(tmp_path / "a.jsonl")


# What people have: prompts alone.


def as_row(item: dict) -> tuple:
    return item["prompt"], item["data_source"], item["reward_model"], item["extra_info"]


def test_a_text_with_a_prompt_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffa cat\n\n  a dog, running \r\n", encoding="utf-8")
    rows = [as_row(item) for item in PromptDataset(tmp_path / "a.txt")]
    assert rows == [(text, "prompts", {"ground_truth": None}, {}) for text in ("a cat", "a dog, running")]


def test_rows_with_a_prompt_alone_and_with_a_ground_truth(tmp_path):
    alone = PromptDataset(write(tmp_path / "a.jsonl", [{"prompt": "a cat"}]))
    assert as_row(alone[0]) == ("a cat", "prompts", {"ground_truth": None}, {})
    told = PromptDataset(write(tmp_path / "b.parquet", [{"prompt": "a sign", "ground_truth": "407"}]))
    assert told[0]["reward_model"] == {"ground_truth": "407"}


@pytest.mark.parametrize("name", ["prompt", "text", "caption"])
def test_images_with_captions_in_metadata(tmp_path, name):
    for i in range(2):
        (tmp_path / f"{i}.png").touch()
    write(tmp_path / "metadata.jsonl", [{"file_name": f"{i}.png", name: f"cat {i}", "style": "ink"} for i in range(2)])
    data = PromptDataset(tmp_path)
    assert [item["prompt"] for item in data] == ["cat 0", "cat 1"]
    assert data[1]["extra_info"] == {"style": "ink", "image": str(tmp_path / "1.png")}


def test_images_with_captions_beside_them(tmp_path):
    (tmp_path / "b.jpg").touch()
    (tmp_path / "b.txt").write_text("a bear\n")
    (tmp_path / "a.png").touch()
    with pytest.raises(ValueError, match=r"a\.png has no caption: expected its prompt in a\.txt beside it"):
        PromptDataset(tmp_path)
    (tmp_path / "a.txt").write_text("an ant")
    assert [item["prompt"] for item in PromptDataset(tmp_path)] == ["an ant", "a bear"]
    with pytest.raises(ValueError, match=r"a\.txt: prompt is empty"):
        (tmp_path / "a.txt").write_text(" ")
        PromptDataset(tmp_path)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 0.0])
def test_a_sound_has_a_length(tmp_path, seconds):
    write(tmp_path / "rows.jsonl", [row(audio_duration_s=seconds)])
    with pytest.raises(ValueError, match="audio_duration_s is .*; expected a number of seconds, such as 2.5"):
        PromptDataset(tmp_path / "rows.jsonl")
