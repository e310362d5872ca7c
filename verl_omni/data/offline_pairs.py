"""Cached preference pairs: latents of a chosen and a rejected image, and the features of their prompt.

A cache is a folder that `python -m verl_omni.data.prepare_offline_dpo` writes: shards of tensors, and manifest.json,
which says what made them. A pair is one item: no shuffling, rank or mini-batch can part its two images.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from verl_omni.config import DiffusionModelConfig
from verl_omni.utils.arrays import object_array
from verl_omni.utils.folders import visible_files
from verl_omni.utils.json_files import read_object

MANIFEST = "manifest.json"
FORMAT = 1
KEYS = ("shards", "architecture", "model", "path", "height", "width", "scores")
MOST_PAIRS = 10**6  # of a shard
SAMPLED_BYTES = 2**20


def check_takes_pairs(model_config: DiffusionModelConfig) -> None:
    """Raise one line where pairs of images, which is what a cache holds, cannot train this model."""
    from verl_omni.pipelines.model_base import DiffusionModelBase

    adapter = DiffusionModelBase.get_class(model_config)
    made = adapter.makes(model_config)
    if made != "image":
        why = f"makes {made}, and cached pairs are of images"
    elif adapter.brings("drawn_conditions"):
        why = "draws each image from tokens that it has written for it, and images of a data set have none"
    elif adapter.needs_images:
        why = "draws from images that come with a prompt, and cached pairs have none"
    elif not adapter.brings("encode_image"):
        why = f"has an adapter, {adapter.__name__}, without encode_image, the inverse of its decode_latents"
    else:
        return
    raise ValueError(
        f"{model_config.path} is a {model_config.architecture}, which {why}: train it with "
        "algorithm.sample_source=online, where each algorithm, dpo too, draws for itself"
    )


class OfflinePairDataset(Dataset):
    """The pairs of one cache, in the order of the data that it was made of."""

    def __init__(self, folder: str | Path, key: str = "data.train_files"):
        self.folder = Path(_single(folder, key)).expanduser()
        if not (self.folder / MANIFEST).is_file():
            raise FileNotFoundError(
                f'{key}="{folder}" holds no {MANIFEST}: offline training reads the folder that '
                "`python -m verl_omni.data.prepare_offline_dpo MODEL DATA FOLDER` writes"
            )
        try:
            self.manifest = read_object(self.folder / MANIFEST)
        except ValueError:
            raise ValueError(f"{self.folder / MANIFEST} is cut off or overwritten: prepare it anew") from None
        if self.manifest.get("format") != FORMAT:
            raise ValueError(f"{self.folder} has format {self.manifest.get('format')}, not {FORMAT}: prepare it anew")
        if missing := [name for name in KEYS if name not in self.manifest]:
            raise ValueError(f"{self.folder / MANIFEST} lacks {', '.join(missing)}: prepare it anew")
        self._places = []
        for shard in self._shards():
            path = self.folder / shard["file"]
            if not os.path.isfile(path) or path.stat().st_size != shard["bytes"]:
                raise ValueError(f"{path} is missing or cut off: prepare {self.folder} anew")
            try:
                with safe_open(path, framework="pt"):  # reads the names of what is in it, and no tensor
                    pass
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged ({error}): prepare {self.folder} anew") from None
            self._places += [(path, i) for i in range(shard["pairs"])]
        self._open: tuple[Path, Any] | None = None

    def _shards(self) -> list[dict[str, Any]]:
        shards, kinds = self.manifest["shards"], {"file": str, "bytes": int, "pairs": int}
        for shard in shards if isinstance(shards, list) else [shards]:
            whole = isinstance(shard, dict) and all(type(shard.get(key)) is kind for key, kind in kinds.items())
            if not whole or Path(shard["file"]).name != shard["file"] or not 0 < shard["pairs"] <= MOST_PAIRS:
                raise ValueError(f"{self.folder / MANIFEST} has a shard {shard!r:.80}: prepare it anew")
        return shards

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, i = self._places[index]
        tensors = self._tensors(path)
        names = [name.removeprefix(f"{i}/") for name in tensors.keys() if name.startswith(f"{i}/")]
        return {"index": index} | {name: tensors.get_tensor(f"{i}/{name}") for name in names}

    def _tensors(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path:
            self._open = (path, safe_open(path, framework="pt"))
        return self._open[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    def check(self, model_config: DiffusionModelConfig, fingerprint: str, needs_scores: bool) -> None:
        """Raise one clear line where these pairs are not for this model, size or loss."""
        made, size = self.manifest, model_config.pipeline
        if made["architecture"] != model_config.architecture or made["model"] != fingerprint:
            raise ValueError(
                f"{self.folder} was prepared with another model ({made['architecture']}, {made['path']}): its latents "
                f"mean nothing to {model_config.path}; prepare it anew with that one"
            )
        if (made["height"], made["width"]) != (size.height, size.width):
            raise ValueError(
                f"{self.folder} holds latents of {made['height']} x {made['width']} images: set "
                f"actor_rollout_ref.rollout.pipeline.height={made['height']} and .width={made['width']} (now "
                f"{size.height} x {size.width}), or prepare it anew"
            )
        if needs_scores and not made["scores"]:
            raise ValueError(
                f"{self.folder} holds no scores, which this loss turns into advantages: prepare it from data with "
                "chosen_score and rejected_score, or set algorithm.paired_preference=true to take 1 and 0"
            )


def collate_pairs(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Two adjacent rows a pair, the chosen image first, each with its prompt's features."""
    batch = {"clean_latents": torch.stack([item[side] for item in items for side in ("chosen", "rejected")])}
    if "scores" in items[0]:
        batch["score"] = torch.cat([item["scores"] for item in items]).float()
    for name in items[0]:
        if name.startswith("prompt/"):
            rows = [item[name] for item in items for _ in range(2)]
            batch[name.removeprefix("prompt/")] = pad_sequence(rows, batch_first=True)
    return batch | {"index": object_array([item["index"] for item in items for _ in range(2)])}


def model_fingerprint(path: str | Path, trained: Iterable[str]) -> str:
    """What the cached tensors depend on: text encoders and VAE, but not the components that are trained.

    Large files count with their size and their first and last mebibyte.
    """
    root = Path(path).expanduser()
    digest = hashlib.sha256()
    for component in sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")):
        if component.name in (*trained, "scheduler"):
            continue
        for part in sorted(p for p in visible_files(component) if p.is_file()):
            size = part.stat().st_size
            digest.update(f"{component.name}/{part.relative_to(component)} {size}".encode())
            with part.open("rb") as file:
                digest.update(file.read(SAMPLED_BYTES))
                file.seek(max(0, size - SAMPLED_BYTES))
                digest.update(file.read())
    return digest.hexdigest()


def _single(folder: Any, key: str) -> Any:
    if isinstance(folder, str | Path):
        return folder
    folders = list(folder)
    if len(folders) != 1:
        raise ValueError(f"{key} names {len(folders)} folders: offline training reads one cache of pairs")
    return folders[0]
