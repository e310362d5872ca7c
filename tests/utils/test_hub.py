"""Models and data by their names on the hub: the hub's real client against a small hub on loopback."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hub_mirror import mirror  # noqa: F401
from huggingface_hub import constants
from huggingface_hub.utils import httpx

from verl_omni.utils import hub


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# As repositories of the hub are: a second copy at the top, halved ones, pickles, a program, pictures.
PIPELINE = {
    "model_index.json": json.dumps(
        {
            "_class_name": "SomePipeline",
            "transformer": ["diffusers", "T"],
            "text_encoder": ["transformers", "E"],
            "image_encoder": [None, None],
        }
    ),
    "transformer/config.json": "{}",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors": "first",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors": "second",
    "transformer/diffusion_pytorch_model.safetensors.index.json": "{}",
    "text_encoder/config.json": "{}",
    "text_encoder/model.safetensors": "whole",
}
UNWANTED = {
    "whole_model.safetensors": "once more",
    "README.md": "words",
    "teaser.png": "a picture",
    "transformer/diffusion_pytorch_model.fp16.safetensors": "half",
    "transformer/diffusion_pytorch_model.fp16.safetensors.index.json": "{}",
    "text_encoder/pytorch_model.bin": "a pickle",
    "text_encoder/pytorch_model.bin.index.json": "{}",
    "text_encoder/modeling.py": "raise SystemExit",
    "image_encoder/model.safetensors": "of nobody",
}


def files_in(folder: str | Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def model(mirror, tmp_path) -> str:  # noqa: F811
    """The commit of somebody/model."""
    return mirror.add("somebody/model", write(tmp_path / "there", PIPELINE | UNWANTED))


def test_fetches_what_a_pipeline_reads_and_nothing_else(model):
    folder = hub.model_folder("somebody/model")
    assert files_in(folder) == set(PIPELINE)
    assert Path(folder).name == model and hub.shown_name(folder) == "model"
    assert str(hub.copied(folder)) == f"somebody/model@{model}"


def test_fetches_of_a_modular_pipeline_what_is_drawn_with(mirror, tmp_path):  # noqa: F811
    """Its index may have been saved before anything was loaded, and names what other tasks need."""
    told = {"pretrained_model_name_or_path": "somebody/modular", "type_hint": ["diffusers", "T"]}
    names = ("transformer", "text_encoder", "transformer_ref")
    index = {"_class_name": "SomeModularPipeline"} | {n: [None, None, told | {"subfolder": n}] for n in names}
    files = {name: text for name, text in PIPELINE.items() if name != "model_index.json"}
    wanted = files | {"modular_model_index.json": json.dumps(index)}
    others = {"transformer_ref/diffusion_pytorch_model.safetensors": "62 GB"}
    mirror.add("somebody/modular", write(tmp_path / "modular", wanted | others | UNWANTED))
    assert files_in(hub.model_folder("somebody/modular")) == set(wanted)


def test_small_files_first_and_the_weights_when_they_are_asked_for(mirror, model):  # noqa: F811
    folder = hub.model_folder("somebody/model", weights=False)
    assert files_in(folder) == {name for name in PIPELINE if not name.endswith(".safetensors")}
    hub.fetch_weights(folder)
    assert files_in(folder) == set(PIPELINE)
    hub.fetch_weights(Path.cwd())  # a folder of one's own: nothing to do


def test_a_pinned_commit_asks_nobody_once_it_is_here(mirror, model, monkeypatch):  # noqa: F811
    folder = hub.model_folder("somebody/model", model)
    mirror.shutdown()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.model_folder("somebody/model", model) == folder
    assert hub.model_folder(f"somebody/model@{model}") == folder


def test_a_revision_is_what_it_was(mirror, model, tmp_path):  # noqa: F811
    older = mirror.add("somebody/model", write(tmp_path / "older", PIPELINE), revision="v1")
    assert hub.pinned("somebody/model", "v1") == hub.pinned("somebody/model@v1") == older
    assert hub.pinned("somebody/model") == model
    with pytest.raises(ValueError, match="one of the two"):
        hub.model_folder("somebody/model@v1", "v2")


def test_a_folder_here_comes_first(mirror, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "somebody/model", PIPELINE)
    assert hub.model_folder("somebody/model") == "somebody/model" and not mirror.asked
    assert hub.model_folder("/no/such/folder") == "/no/such/folder"  # whoever reads it says so


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("somebody/modle", r'path="somebody/modle" is no folder here, and the hub shows no model of that name'),
        ("somebody/model@v9", r'somebody/model has no revision "v9"'),
        ("somebody/gated", r"is gated: accept its terms .* HF_TOKEN=hf_\.\.\. before the command, or `hf auth login`"),
        ("somebody/pickled", r"the weights pytorch_model\.bin are a pickle"),
        ("somebody/empty", r"holds no weights \(model\.safetensors"),
    ],
)
def test_says_in_one_line_what_is_not_to_be_had(mirror, model, tmp_path, source, expected):  # noqa: F811
    mirror.add("somebody/gated", write(tmp_path / "gated", PIPELINE))
    mirror.gated.add("somebody/gated")
    mirror.add("somebody/pickled", write(tmp_path / "pickled", {"config.json": "{}", "pytorch_model.bin": "x"}))
    mirror.add("somebody/empty", write(tmp_path / "empty", {"config.json": "{}"}))
    with pytest.raises(hub.HubError, match=expected) as told:
        hub.model_folder(source)
    assert "\n" not in str(told.value)


def test_a_token_opens_what_is_gated(mirror, model, monkeypatch):  # noqa: F811
    mirror.gated.add("somebody/model")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert files_in(hub.model_folder("somebody/model")) == set(PIPELINE)


def test_offline_takes_what_is_here_and_says_what_is_not(mirror, model, monkeypatch):  # noqa: F811
    with_small = hub.model_folder("somebody/model", weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub._commit.cache_clear()
    assert hub.model_folder("somebody/model", weights=False) == with_small
    for name in ("somebody/model", "somebody/other"):
        with pytest.raises(hub.HubError, match="in the cache .*: HF_HUB_OFFLINE is set; download it where there is a"):
            hub.model_folder(name)


def test_says_that_it_takes_the_cached_one_where_the_hub_cannot_be_reached(mirror, model, monkeypatch, capsys):  # noqa: F811
    folder = hub.model_folder("somebody/model")
    hub._commit.cache_clear()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.model_folder("somebody/model") == folder
    assert f"The hub cannot be reached: somebody/model as it is in the cache, {model[:8]}" in capsys.readouterr().err
    with pytest.raises(hub.HubError, match="the hub cannot be reached"):
        hub.model_folder("somebody/other")


def test_compares_sizes_with_the_free_space_before_it_starts(mirror, tmp_path, monkeypatch, capsys):  # noqa: F811
    large = "x" * (hub.WORTH_A_BAR + 1)
    mirror.add("somebody/large", write(tmp_path / "large", {"config.json": "{}", "model.safetensors": large}))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=hub.RESERVE))
    with pytest.raises(hub.HubError, match=r"0\.00 GB are to be downloaded to .*make room, or set HF_HOME"):
        hub.model_folder("somebody/large")
    assert "model.safetensors" not in mirror.asked
    monkeypatch.undo()


def test_a_lost_connection_costs_no_byte_twice(mirror, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
    size = hub.WORTH_A_BAR * 3
    content = os.urandom(size // 2).hex()
    sha = mirror.add("somebody/large", write(tmp_path / "large", {"config.json": "{}", "model.safetensors": content}))
    mirror.break_after = 2**20
    folder = hub.model_folder("somebody/large")
    assert Path(folder, "model.safetensors").read_text() == content
    (path,) = (path for path in mirror.bytes_sent if "model.safetensors" in path)
    assert mirror.break_after is None and size <= mirror.bytes_sent[path] < size + 2**17
    assert f"Downloading somebody/large at {sha[:8]} (2 files, 0.00 GB)" in capsys.readouterr().err


def test_an_interrupted_download_keeps_the_files_that_are_whole(mirror, model):  # noqa: F811
    last = "transformer/diffusion_pytorch_model-00002-of-00002.safetensors"
    mirror.withheld.add(last)
    with pytest.raises(hub.HubError, match=r"not wholly, in the cache .* does not give it \(.*403"):
        hub.model_folder("somebody/model")
    kept = set(mirror.asked)
    mirror.withheld.clear()
    mirror.asked.clear()
    assert files_in(hub.model_folder("somebody/model")) == set(PIPELINE)
    assert last in mirror.asked and not kept & set(mirror.asked)


def test_says_how_to_go_on_where_the_connection_is_lost_for_good(mirror, model, monkeypatch):  # noqa: F811
    def lost(*args, **kwargs):
        raise httpx.RemoteProtocolError("peer closed connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", lost)
    with pytest.raises(hub.HubError, match=r"interrupted \(peer closed connection\); the same command fetches"):
        hub.model_folder("somebody/model")


DATA = {
    "README.md": "---\n---",
    "loader.py": "raise SystemExit",
    "data/train-00000-of-00002.parquet": "",
    "data/train-00001-of-00002.parquet": "",
    "data/test.jsonl": '{"prompt": "a cube"}\n',
}


def test_files_of_a_data_set(mirror, tmp_path):  # noqa: F811
    sha = mirror.add("somebody/prompts", write(tmp_path / "rows", DATA), kind="dataset")
    (test,) = hub.data_files("hf://datasets/somebody/prompts/data/test.jsonl", "data.val_files")
    assert test.read_text() == DATA["data/test.jsonl"]
    train = hub.data_files("hf://datasets/somebody/prompts/data/train-*.parquet", "data.train_files")
    assert [path.name for path in train] == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert len(hub.data_files(f"hf://datasets/somebody/prompts@{sha}/data", "data.train_files")) == 3
    pinned = hub.pin_data("hf://datasets/somebody/prompts/data/test.jsonl", "data.val_files")
    assert pinned == f"hf://datasets/somebody/prompts@{sha}/data/test.jsonl"
    assert "loader.py" not in mirror.asked


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf://datasets/somebody/prompts", "has 3 files of prompts: name a file, .* there: .*data/train-\\*.parquet"),
        ("hf://datasets/somebody/prompts/trian.jsonl", "has no trian.jsonl: .* data/test.jsonl"),
        ("hf://datasets/somebody/nothing/a.txt", "no data set of that name"),
        ("hf://somebody/prompts/a.txt", "expected hf://datasets/OWNER/NAME/FILE"),
    ],
)
def test_says_which_files_a_data_set_has(mirror, tmp_path, source, expected):  # noqa: F811
    mirror.add("somebody/prompts", write(tmp_path / "rows", DATA), kind="dataset")
    with pytest.raises((hub.HubError, ValueError), match=expected):
        hub.data_files(source, "data.train_files")
