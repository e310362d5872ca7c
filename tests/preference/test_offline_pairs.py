"""prepare_offline_dpo and the data set that reads what it writes: what is cached, bad input, interruptions, pairs."""

import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from tiny_models import tiny_checkpoint

from verl_omni.config import DiffusionModelConfig, DiffusionPipelineConfig
from verl_omni.data import prepare_offline_dpo
from verl_omni.data.offline_pairs import OfflinePairDataset, check_takes_pairs, collate_pairs, model_fingerprint
from verl_omni.data.prepare_offline_dpo import prepare, read_pairs
from verl_omni.data.prompt_loader import create_dataloader
from verl_omni.pipelines.builtin import BUILTIN
from verl_omni.pipelines.model_base import DiffusionModelBase

QWEN, SD3 = "QwenImagePipeline", "StableDiffusion3Pipeline"
PROMPTS = ["a cat", "a much longer prompt about two dogs and a boat", "a tree"]


def write_image(path: Path, seed: int, size: tuple[int, int] = (32, 32)) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path.name


def pair_rows(folder: Path, scores: bool = True) -> list[dict]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i, prompt in enumerate(PROMPTS):
        rows.append({
            "prompt": prompt,
            "chosen": write_image(folder / f"{i}_good.png", 2 * i),
            "rejected": write_image(folder / f"{i}_bad.png", 2 * i + 1),
        })  # fmt: skip
        if scores:
            rows[-1] |= {"chosen_score": 0.9, "rejected_score": 0.1 * i}
    return rows


def image_rows(folder: Path) -> list[dict]:
    """The same pairs, an image a row."""
    return [
        {"prompt": row["prompt"], "image": row[side], "score": row[f"{side}_score"]}
        for row in pair_rows(folder)
        for side in ("chosen", "rejected")
    ]


def write_jsonl(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def model_config(architecture: str = QWEN, size: int = 32) -> DiffusionModelConfig:
    pipeline = DiffusionPipelineConfig(height=size, width=size, max_sequence_length=128)
    return DiffusionModelConfig(path=str(tiny_checkpoint(architecture)), pipeline=pipeline)


def make(tmp_path: Path, data: Path, architecture: str = QWEN, **options) -> OfflinePairDataset:
    options = {"height": 32, "width": 32, "max_sequence_length": 128, "pairs_per_shard": 2, "device": "cpu"} | options
    return OfflinePairDataset(prepare(tiny_checkpoint(architecture), data, tmp_path / "cache", **options))


@pytest.mark.parametrize("architecture", [QWEN, SD3, "FluxPipeline", "ZImagePipeline"])
def test_encoding_is_the_inverse_of_decoding(architecture):
    """With the VAE taken out: what is left is packing, scale and shift, which have to cancel exactly."""
    config = model_config(architecture)
    adapter = DiffusionModelBase.get_class(config)
    pipe = adapter.load_pipeline(config, "cpu", torch.float32)
    latents = adapter.encode_image(pipe, torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), config)
    module = adapter.load_module(config, torch.float32)
    assert latents.shape == adapter.prepare_latents(pipe, module, config, [torch.Generator()] * 2).shape
    assert latents.dtype == torch.float32
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    kernel = images[:, :, None] if architecture == QWEN else images
    with torch.no_grad():
        raw = pipe.vae.encode(2 * kernel - 1).latent_dist.mode()
    seen = {}
    pipe.vae.decode = lambda z, return_dict: (
        seen.update(z=z) or (torch.zeros(2, 3, *([1] if z.ndim == 5 else []), 4, 4),)
    )
    adapter.decode_latents(pipe, latents, config)
    torch.testing.assert_close(seen["z"], raw, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", [QWEN, SD3])
def test_cached_tensors_are_what_the_model_makes_of_the_images_and_prompts(tmp_path, architecture):
    data = write_jsonl(tmp_path / "data", pair_rows(tmp_path / "data"))
    dataset = make(tmp_path, data, architecture)
    config = model_config(architecture)
    adapter = DiffusionModelBase.get_class(config)
    pipe, tokenizers = adapter.load_pipeline(config, "cpu", torch.float32), adapter.load_tokenizers(config)
    for i, prompt in enumerate(PROMPTS):
        item = dataset[i]
        for side, name in (("chosen", "good"), ("rejected", "bad")):
            pixels = np.asarray(Image.open(tmp_path / "data" / f"{i}_{name}.png")) / np.float32(255)
            image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
            with torch.no_grad():
                torch.testing.assert_close(item[side][None], adapter.encode_image(pipe, image, config))
        with torch.no_grad():
            features = adapter.encode_prompt(pipe, adapter.tokenize(tokenizers, prompt, 128), config)
        for name, value in features.items():
            torch.testing.assert_close(item[f"prompt/{name}"][None], value)
        assert item["scores"].tolist() == pytest.approx([0.9, 0.1 * i])


def test_files_of_every_kind_give_the_same_pairs(tmp_path):
    folder = tmp_path / "data"
    rows = pair_rows(folder)
    one = read_pairs(write_jsonl(folder, rows))
    assert [p[1:] for p in one] == [p[1:] for p in read_pairs(folder / "metadata.jsonl")]
    pd.DataFrame(rows).to_parquet(folder / "pairs.parquet")
    assert [p[1:] for p in one] == [p[1:] for p in read_pairs(folder / "pairs.parquet")]
    pd.DataFrame(image_rows(folder)).to_parquet(folder / "images.parquet")
    assert [p[1:] for p in one] == [p[1:] for p in read_pairs(folder / "images.parquet")]
    embedded = [
        row | {side: {"bytes": (folder / row[side]).read_bytes(), "path": None} for side in ("chosen", "rejected")}
        for row in rows
    ]
    pd.DataFrame(embedded).to_parquet(folder / "embedded.parquet")
    held = read_pairs(folder / "embedded.parquet")
    assert [p.chosen for p in held] == [(folder / row["chosen"]).read_bytes() for row in rows]


def change(rows: list[dict], row: int, **values) -> list[dict]:
    return [r | values if i == row else r for i, r in enumerate(rows)]


BAD = {
    "odd": (lambda r, f: image_rows(f)[:5], "5 rows of single images, an odd number"),
    "prompts": (
        lambda r, f: change(image_rows(f), 3, prompt="a dog"),
        r'line 3 and line 4 are a pair but have different prompts: "a much .*" and "a dog"',
    ),
    "worse": (lambda r, f: change(r, 1, chosen_score=0.05), "the chosen image scores 0.05, the rejected one 0.1"),
    "equal": (lambda r, f: change(r, 2, chosen_score=0.2), "swap them or drop the pair"),
    "half scored": (lambda r, f: change(r, 1, chosen_score=None), "expected two numbers, or none at all"),
    "some scored": (
        lambda r, f: change(r, 1, chosen_score=None, rejected_score=None), "line 2 has no scores, but other rows have",
    ),
    "nan": (lambda r, f: change(r, 1, chosen_score=float("nan")), "expected two numbers"),
    "no file": (lambda r, f: change(r, 0, rejected="gone.png"), "line 1: the rejected image .*gone.png is not there"),
    "no image": (lambda r, f: change(r, 0, chosen=None), "there is no chosen image"),
    "no picture": (lambda r, f: change(r, 2, chosen="metadata.jsonl"), "line 3: unreadable image"),
    "size": (
        lambda r, f: change(r, 2, chosen=write_image(f / "big.png", 9, (64, 48))), "image is 64 x 48, not 32 x 32",
    ),
    "half a letter": (lambda r, f: change(r, 1, prompt="\ud83d"), r"line 2: .*letter 1 is .ud83d"),
    "empty prompt": (lambda r, f: change(r, 1, prompt=" "), "line 2: the prompt is empty"),
    "columns": (lambda r, f: [{"prompt": "a", "picture": "b"}], "columns prompt, picture: expected"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_in_one_line_and_nothing_is_written(tmp_path, case):
    folder = tmp_path / "data"
    rows, message = BAD[case]
    data = write_jsonl(folder, rows(pair_rows(folder), folder))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        make(tmp_path, data)
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data"]


def test_the_command_says_a_mistake_in_one_line(tmp_path, monkeypatch):
    data = write_jsonl(tmp_path / "data", image_rows(tmp_path / "data")[:3])
    monkeypatch.chdir(tmp_path)
    given = [str(tiny_checkpoint()), str(data), "out", "--height", "32", "--width", "32"]
    monkeypatch.setattr("sys.argv", ["prepare_offline_dpo", *given])
    with pytest.raises(SystemExit) as left:
        prepare_offline_dpo.main()
    said = left.value.code  # Python prints it and exits with 1
    assert said.startswith("error: ") and "odd number" in said and "\n" not in said


REFUSED = {
    "GlmImagePipeline": "draws each image from tokens .* images of a data set have none",
    "QwenImageEditPlusPipeline": "draws from images that come with a prompt, and cached pairs have none",
    "FluxKontextPipeline": "draws from images that come with a prompt, and cached pairs have none",
    "WanPipeline": "makes video, and cached pairs are of images",
    "HunyuanVideo15Pipeline": "makes video, and cached pairs are of images",
    "LTX2Pipeline": "makes video with sound, and cached pairs are of images",
    "MiniMaxH3ModularPipeline": "makes video with sound, and cached pairs are of images",
    "LongCatAudioDiTPipeline": "makes sound, and cached pairs are of images",
    "AceStepPipeline": "makes sound, and cached pairs are of images",
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_model_that_no_pairs_of_images_train_is_refused_before_anything_is_read(tmp_path, architecture):
    with pytest.raises(ValueError, match=f"{REFUSED[architecture]}: train it with .*=online") as error:
        prepare(tiny_checkpoint(architecture), tmp_path / "not there", tmp_path / "out", 32, 32)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_every_other_model_takes_pairs():
    """Those in whose images-to-latents test an encode_image is compared with diffusers' VAE."""
    taken = [QWEN, SD3, "FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline", "ZImagePipeline", "ChromaPipeline",
             "CogView4Pipeline", "Lumina2Pipeline"]  # fmt: skip
    assert {*taken, *REFUSED, "WanImageToVideoPipeline", "LTX2ImageToVideoPipeline"} == set(BUILTIN)
    for architecture in taken:
        check_takes_pairs(model_config(architecture))


def test_an_adapter_that_cannot_turn_images_into_latents_is_refused(monkeypatch):
    config = model_config(QWEN)
    monkeypatch.delattr(DiffusionModelBase.get_class(config), "encode_image")
    with pytest.raises(ValueError, match="has an adapter, .*, without encode_image"):
        check_takes_pairs(config)


def test_resize_takes_images_of_another_size(tmp_path):
    folder = tmp_path / "data"
    rows = change(pair_rows(folder), 0, chosen=write_image(folder / "big.png", 9, (64, 48)))
    assert len(make(tmp_path, write_jsonl(folder, rows), resize=True)) == 3


def test_an_interruption_costs_one_shard_and_leaves_no_cache(tmp_path, monkeypatch):
    data = write_jsonl(tmp_path / "data", pair_rows(tmp_path / "data"))
    write, written = prepare_offline_dpo._write_atomically, []

    def interrupted(path, content):
        if path.name == "shard_00001.safetensors":
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(prepare_offline_dpo, "_write_atomically", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, data)
    assert not (tmp_path / "cache").exists() and (tmp_path / "cache.partial").is_dir()
    with pytest.raises(ValueError, match="unfinished preparation of something else"):
        make(tmp_path, data, pairs_per_shard=1)

    monkeypatch.setattr(prepare_offline_dpo, "_write_atomically", lambda p, c: written.append(p.name) or write(p, c))
    resumed = make(tmp_path, data)
    assert "shard_00000.safetensors" not in written and "shard_00001.safetensors" in written
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "data"]
    (tmp_path / "other").mkdir()
    whole = make(tmp_path / "other", data)
    for i in range(3):
        ours, theirs = resumed[i], whole[i]
        assert all(torch.equal(ours[k], theirs[k]) for k in ours.keys() | theirs.keys() if k != "index")
    written.clear()
    make(tmp_path, data)  # whole already
    assert written == []
    with pytest.raises(ValueError, match="already there and was made from something else"):
        make(tmp_path, data, pairs_per_shard=1)


def test_a_cache_for_another_model_size_or_loss_is_refused(tmp_path):
    dataset = make(tmp_path, write_jsonl(tmp_path / "data", pair_rows(tmp_path / "data", scores=False)))

    def fingerprint(config):
        return model_fingerprint(config.path, DiffusionModelBase.get_class(config).trained_components)

    config = model_config()
    dataset.check(config, fingerprint(config), needs_scores=False)
    other = DiffusionModelConfig(path=str(tiny_checkpoint(seed=1)), pipeline=config.pipeline)
    for wrong in (other, model_config(SD3)):
        with pytest.raises(ValueError, match="was prepared with another model"):
            dataset.check(wrong, fingerprint(wrong), needs_scores=False)
    with pytest.raises(ValueError, match=r"latents of 32 x 32 images: set .*height=32 and .width=32 \(now 64 x 64\)"):
        dataset.check(model_config(size=64), fingerprint(config), needs_scores=False)
    with pytest.raises(ValueError, match="holds no scores, which this loss turns into advantages"):
        dataset.check(config, fingerprint(config), needs_scores=True)
    shard = next((tmp_path / "cache").glob("shard_*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is missing or cut off"):
        OfflinePairDataset(tmp_path / "cache")
    with pytest.raises(FileNotFoundError, match=re.escape("holds no manifest.json")):
        OfflinePairDataset(tmp_path / "data")


def test_another_transformer_of_the_same_model_may_use_the_cache(tmp_path):
    copy = tmp_path / "model"
    copy.mkdir()
    for part in tiny_checkpoint().iterdir():
        if part.name != "transformer":
            (copy / part.name).symlink_to(part)
    assert model_fingerprint(copy, ["transformer"]) == model_fingerprint(tiny_checkpoint(), ["transformer"])


def test_pairs_stay_together_through_shuffling_and_batching(tmp_path):
    dataset = make(tmp_path, write_jsonl(tmp_path / "data", pair_rows(tmp_path / "data")))
    loader = create_dataloader(dataset, 2, shuffle=True, seed=1, collate_fn=collate_pairs)
    batches, seen = iter(loader), []
    for _ in range(3):
        batch = next(batches)
        assert batch["index"][::2].tolist() == batch["index"][1::2].tolist()
        for row, index in enumerate(batch["index"][::2]):
            item = dataset[index]
            assert torch.equal(batch["clean_latents"][2 * row], item["chosen"])
            assert torch.equal(batch["clean_latents"][2 * row + 1], item["rejected"])
            length = len(item["prompt/prompt_embeds"])
            assert torch.equal(batch["prompt_embeds"][2 * row + 1, :length], item["prompt/prompt_embeds"])
            assert int(batch["prompt_embeds_mask"][2 * row].sum()) == length
            assert batch["score"][2 * row : 2 * row + 2].tolist() == item["scores"].tolist()
        seen += batch["index"][::2].tolist()
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, proof: Path):
        self.proof = str(proof)

    def __reduce__(self):
        return os.mkdir, (self.proof,)


def test_a_cache_from_a_stranger_runs_nothing_and_is_refused_in_one_line(tmp_path):
    data = write_jsonl(tmp_path / "data", pair_rows(tmp_path / "data"))
    cache = prepare(tiny_checkpoint(), data, tmp_path / "out", 32, 32)
    for name, said in (("shard_00000.safetensors", "is damaged"), ("manifest.json", "is cut off or overwritten")):
        content = pickle.dumps(Payload(tmp_path / "ran"))
        whole = (cache / name).read_bytes()
        (cache / name).write_bytes(content.ljust(len(whole), b"\0"))
        with pytest.raises(ValueError, match=said):
            OfflinePairDataset(cache)
        (cache / name).write_bytes(whole)
    OfflinePairDataset(cache)
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)
    assert (tmp_path / "ran").exists(), "the payload does run where a pickle is read"


def test_a_manifest_without_its_keys_is_named(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": 1, "shards": []}')
    with pytest.raises(ValueError, match="manifest.json lacks architecture, model, path, height, width, scores"):
        OfflinePairDataset(tmp_path)


SHARD = {"file": "x", "bytes": 1, "pairs": 1}


@pytest.mark.parametrize("shards", [None, [3], [{"file": "x"}], [SHARD | {"file": "../x"}], [SHARD | {"pairs": 9e9}]])
def test_a_manifest_with_strange_shards_is_named(tmp_path, shards):
    made = dict.fromkeys(("architecture", "model", "path", "height", "width", "scores"))
    made |= {"format": 1, "shards": shards}
    (tmp_path / "manifest.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match="manifest.json has a shard .*: prepare it anew"):
        OfflinePairDataset(tmp_path)


def test_a_nested_manifest_is_named(tmp_path):
    (tmp_path / "manifest.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match="manifest.json is cut off or overwritten"):
        OfflinePairDataset(tmp_path)
