"""Turn preference pairs (prompt, chosen and rejected image) into cached latents and prompt features.

`verl-omni prepare-pairs` and `python -m verl_omni.data.prepare_offline_dpo`; `pair_options.py` says what it takes.
"""

import argparse
import hashlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from verl_omni.algorithms.registry import fill_nulls
from verl_omni.config import DiffusionModelConfig, DiffusionPipelineConfig
from verl_omni.data.offline_pairs import (
    FORMAT,
    MANIFEST,
    OfflinePairDataset,
    check_takes_pairs,
    model_fingerprint,
)
from verl_omni.data.pair_options import parser
from verl_omni.data.prompt_files import read_file
from verl_omni.data.prompt_rows import user_text
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.model_folder import check_model_folder
from verl_omni.utils.json_files import read_object

PAIR_COLUMNS = ("prompt", "chosen", "rejected")
IMAGE_COLUMNS = ("prompt", "image")


class Pair(NamedTuple):
    where: str  # for messages
    prompt: str
    chosen: Path | bytes
    rejected: Path | bytes
    scores: tuple[float, float] | None


def read_pairs(data: str | Path) -> list[Pair]:
    """All pairs of a file or folder, checked: prompts agree, images exist, the chosen one scores higher."""
    path = _metadata_file(Path(data).expanduser())
    file = read_file(path, "DATA")
    if set(PAIR_COLUMNS) <= set(file.columns):
        names = (*PAIR_COLUMNS, "chosen_score", "rejected_score")
        pairs = [_pair(where, row, row, path.parent) for where, row in file.scan(names)]
    elif set(IMAGE_COLUMNS) <= set(file.columns):
        pairs = _adjacent_pairs(list(file.scan((*IMAGE_COLUMNS, "score"))), path)
    else:
        raise ValueError(
            f"{path} has the columns {', '.join(file.columns)}: expected {', '.join(PAIR_COLUMNS)} (a pair a row), or "
            f"{', '.join(IMAGE_COLUMNS)} (an image a row, chosen and rejected in turn)"
        )
    scored = [pair.scores is not None for pair in pairs]
    if any(scored) and not all(scored):
        raise ValueError(f"{pairs[scored.index(False)].where} has no scores, but other rows have: give all or none")
    return pairs


def _metadata_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = [path / name for name in ("metadata.jsonl", "metadata.parquet") if (path / name).is_file()]
    if len(found) != 1:
        raise ValueError(f"{path} holds {len(found)} of metadata.jsonl and metadata.parquet: expected exactly one")
    return found[0]


def _adjacent_pairs(rows: list[tuple[str, dict]], path: Path) -> list[Pair]:
    if len(rows) % 2:
        raise ValueError(
            f"{path} has {len(rows)} rows of single images, an odd number: expected a chosen and a rejected one in turn"
        )
    pairs = []
    for (where, chosen), (other, rejected) in zip(rows[::2], rows[1::2], strict=True):
        both = {
            "chosen": chosen["image"], "rejected": rejected["image"],
            "chosen_score": chosen["score"], "rejected_score": rejected["score"],
        }  # fmt: skip
        where = f"{where} and {other.rsplit(', ', 1)[1]}"
        pairs.append(_pair(where, chosen | both, rejected, path.parent))
    return pairs


def _pair(where: str, row: dict[str, Any], other: dict[str, Any], folder: Path) -> Pair:
    prompts = [_prompt(where, r["prompt"]) for r in (row, other)]
    if prompts[0] != prompts[1]:
        raise ValueError(f'{where} are a pair but have different prompts: "{prompts[0]}" and "{prompts[1]}"')
    images = [_image(where, side, row[side], folder) for side in ("chosen", "rejected")]
    scores = (row["chosen_score"], row["rejected_score"])
    if scores == (None, None):
        return Pair(where, prompts[0], *images, None)
    if not all(isinstance(s, int | float) and abs(s) < float("inf") for s in scores):
        raise ValueError(f"{where}: the scores are {scores[0]} and {scores[1]}: expected two numbers, or none at all")
    if scores[0] <= scores[1]:
        raise ValueError(
            f"{where}: the chosen image scores {scores[0]}, the rejected one {scores[1]}: the chosen one has to be the "
            "better one; swap them or drop the pair"
        )
    return Pair(where, prompts[0], *images, (float(scores[0]), float(scores[1])))


def _prompt(where: str, value: Any) -> str:
    try:
        text = user_text(value if value is not None else "")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not text.strip():
        raise ValueError(f"{where}: the prompt is empty")
    return text


def _image(where: str, side: str, value: Any, folder: Path) -> Path | bytes:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: there is no {side} image: expected a path or the image's bytes")
    path = folder / value
    if not path.is_file():
        raise FileNotFoundError(f"{where}: the {side} image {path} is not there")
    return path


def open_image(source: Path | bytes, where: str, size: DiffusionPipelineConfig, resize: bool) -> Any:
    """The PIL image, of which only the header is read yet."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except OSError as error:
        raise ValueError(f"{where}: unreadable image: {error}") from error
    if image.size != (size.width, size.height) and not resize:
        raise ValueError(
            f"{where}: the image is {image.height} x {image.width}, not {size.height} x {size.width}: give its size "
            "with --height and --width, or add --resize"
        )
    return image


def load_image(source: Path | bytes, where: str, size: DiffusionPipelineConfig, resize: bool) -> torch.Tensor:
    """(3, H, W) in [0, 1]; `resize` scales to cover the size and cuts off the rest."""
    import numpy as np
    from PIL import ImageOps

    image = open_image(source, where, size, resize).convert("RGB")
    if image.size != (size.width, size.height):
        image = ImageOps.fit(image, (size.width, size.height))
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


class Preparation:
    """Encodes pairs shard by shard into OUT.partial and publishes the whole as OUT."""

    def __init__(self, model_config: DiffusionModelConfig, pairs: list[Pair], out: Path, per_shard: int, resize: bool):
        self.model_config, self.pairs, self.out, self.resize = model_config, pairs, out, resize
        self.partial = out.with_name(out.name + ".partial")
        self.shards = [pairs[i : i + per_shard] for i in range(0, len(pairs), per_shard)]
        self.adapter = DiffusionModelBase.get_class(model_config)
        size = model_config.pipeline
        self.job = {
            "format": FORMAT,
            "architecture": model_config.architecture,
            "path": model_config.path,
            "model": model_fingerprint(model_config.path, self.adapter.trained_components),
            "height": size.height,
            "width": size.width,
            "scores": pairs[0].scores is not None,
            "pairs": len(pairs),
            "data": _digest(pairs, per_shard, resize, size.max_sequence_length),
        }

    def is_done(self) -> bool:
        """Whether OUT is already what would be written; another OUT is an error."""
        if not self.out.exists():
            return False
        known = self.out / MANIFEST
        made = read_object(known) if known.is_file() else {}
        if {k: made.get(k) for k in self.job} == self.job:
            return True
        raise ValueError(f"{self.out} is already there and was made from something else: delete it or name another")

    def run(self, device: torch.device) -> None:
        job = self.partial / "job.json"
        if self.partial.exists() and (not job.is_file() or read_object(job) != self.job):
            raise ValueError(
                f"{self.partial} is an unfinished preparation of something else: delete it or name another output"
            )
        adapter, size = self.adapter, self.model_config.pipeline
        for pair in self.pairs:
            for image in (pair.chosen, pair.rejected):
                open_image(image, pair.where, size, self.resize).close()
        tokenizers = adapter.load_tokenizers(self.model_config)
        ids = {p.prompt: adapter.tokenize(tokenizers, p.prompt, size.max_sequence_length) for p in self.pairs}
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        pipe = adapter.load_pipeline(self.model_config, device, dtype)
        self.partial.mkdir(parents=True, exist_ok=True)
        _write_atomically(job, json.dumps(self.job).encode())
        with tqdm(total=len(self.pairs), desc="encoding pairs", unit="pair") as bar:
            for number, pairs in enumerate(self.shards):
                path = self.partial / f"shard_{number:05d}.safetensors"
                if not path.exists():
                    self._encode(pipe, pairs, ids, path)
                bar.update(len(pairs))
        self._publish()

    @torch.no_grad()
    def _encode(self, pipe: Any, pairs: list[Pair], ids: dict[str, list[int]], path: Path) -> None:
        from safetensors.torch import save

        adapter, config, tensors = self.adapter, self.model_config, {}
        for i, pair in enumerate(pairs):
            images = [load_image(s, pair.where, config.pipeline, self.resize) for s in (pair.chosen, pair.rejected)]
            latents = adapter.encode_image(pipe, torch.stack(images).to(pipe.device), config).float().cpu()
            if not latents.isfinite().all():
                raise ValueError(f"{pair.where}: the model's VAE gives latents that are not numbers")
            tensors |= {f"{i}/chosen": latents[0].contiguous(), f"{i}/rejected": latents[1].contiguous()}
            if pair.scores is not None:
                tensors[f"{i}/scores"] = torch.tensor(pair.scores)
            encoded = adapter.encode_prompt(pipe, ids[pair.prompt], config) | adapter.encode_images(pipe, None, config)
            for name, value in encoded.items():
                tensors[f"{i}/prompt/{name}"] = value[0].cpu().contiguous()
        _write_atomically(path, save(tensors))

    def _publish(self) -> None:
        """Write the manifest, read every pair back, and give the folder its name."""
        files = [self.partial / f"shard_{number:05d}.safetensors" for number in range(len(self.shards))]
        shards = [
            {"file": file.name, "pairs": len(pairs), "bytes": file.stat().st_size}
            for file, pairs in zip(files, self.shards, strict=True)
        ]
        _write_atomically(self.partial / MANIFEST, json.dumps(self.job | {"shards": shards}, indent=1).encode())
        dataset = OfflinePairDataset(self.partial)
        shape = dataset[0]["chosen"].shape
        for i in range(len(dataset)):
            pair = dataset[i]
            if any(pair[side].shape != shape or not pair[side].isfinite().all() for side in ("chosen", "rejected")):
                raise RuntimeError(f"pair {i} was not written as it was encoded: delete {self.partial} and start again")
        (self.partial / "job.json").unlink()
        self.partial.rename(self.out)


def _write_atomically(path: Path, content: bytes) -> None:
    writing = path.with_name(f".{path.name}")
    with writing.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    writing.replace(path)


def _digest(pairs: list[Pair], *settings: Any) -> str:
    """Of the rows and of what their encoding depends on; an image file counts with its path, size and time."""
    digest = hashlib.sha256(repr(settings).encode())
    for pair in pairs:
        digest.update(repr((pair.prompt, pair.scores)).encode())
        for image in (pair.chosen, pair.rejected):
            if isinstance(image, Path):
                stat = image.stat()
                image = repr((str(image), stat.st_size, stat.st_mtime_ns)).encode()
            digest.update(hashlib.sha256(image).digest())
    return digest.hexdigest()


def prepare(
    model: str | Path,
    data: str | Path,
    out: str | Path,
    height: int,
    width: int,
    max_sequence_length: int | None = None,
    pairs_per_shard: int = 64,
    resize: bool = False,
    device: str | None = None,
) -> Path:
    """Make the cache `out` from the pairs in `data`; the folder, which may have been whole before."""
    pipeline = DiffusionPipelineConfig(height=height, width=width, max_sequence_length=max_sequence_length)
    config = DiffusionModelConfig(path=str(model), pipeline=pipeline)
    check_model_folder(config)
    check_takes_pairs(config)
    adapter = DiffusionModelBase.get_class(config)
    config.pipeline = fill_nulls(pipeline, adapter.pipeline_defaults, f"the pipeline defaults of {adapter.__name__}")
    multiple = adapter.vae_scale_factor(config) * adapter.size_multiple
    for name, value in (("height", height), ("width", width)):
        if value < multiple or value % multiple:
            raise ValueError(f"--{name} {value} is no multiple of {multiple}, which this model needs")
    preparation = Preparation(config, read_pairs(data), Path(out).expanduser(), pairs_per_shard, resize)
    if not preparation.is_done():
        preparation.run(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    return preparation.out


def main() -> None:
    run(parser().parse_args())


def run(options: argparse.Namespace) -> None:
    try:
        out = prepare(**vars(options))
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        sys.exit(f"error: {error}")
    print(f"{len(OfflinePairDataset(out))} pairs in {out}")


if __name__ == "__main__":
    main()
