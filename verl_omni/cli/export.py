"""Write what a run has trained as files that other programs load.

    verl-omni export outputs/run lora/                      LoRA for diffusers: pipe.load_lora_weights("lora/")
    verl-omni export outputs/run lora/ --format kohya       LoRA with kohya's keys, as ComfyUI reads them
    verl-omni export outputs/run model/ --format merged     a whole model: DiffusionPipeline.from_pretrained("model/")
"""

import argparse
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from verl_omni.cli.trained import LORA_FILE, Weights, find_weights
from verl_omni.utils.options import Parser
from verl_omni.utils.suggest import unknown

if TYPE_CHECKING:
    import torch


def main() -> None:
    parser = Parser(
        "verl-omni export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", metavar="RUN|CHECKPOINT", help="a folder; of a run, its last checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--format", choices=("diffusers", "kohya", "merged"), default="diffusers", help="(%(default)s)")
    parser.add_argument("--model", metavar="DIR", help="the model that was trained, where it lies elsewhere now")
    options = parser.parse_args()
    try:
        out = export(options.weights, options.out, options.format, options.model)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    weights = find_weights(options.weights, options.model)
    print(f"{weights.name} of {weights.export.parent.parent}: {out}")


def export(place: str | Path, out: str | Path, format: str = "diffusers", model: str | None = None) -> Path:
    """The folder, with what a run or a checkpoint has trained in it."""
    formats = {"diffusers": as_diffusers, "kohya": as_kohya, "merged": merged}
    if format not in formats:
        raise ValueError(unknown("format", format, formats))
    out = Path(out).expanduser()
    if out.exists():
        raise FileExistsError(f"{out} is there already: name a new folder")
    weights = find_weights(place, model)
    if weights.export is None:
        raise ValueError(f"{place} is a whole model already: there is nothing to export")
    try:
        formats[format](weights, out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # the part that was written
        raise
    return out


def as_diffusers(weights: Weights, out: Path) -> None:
    shutil.copytree(weights.export, out)


def as_kohya(weights: Weights, out: Path) -> None:
    """The same LoRA under other names; the model's own weights are not read."""
    from safetensors.torch import save_file

    from verl_omni.cli import kohya_keys
    from verl_omni.cli.painter import lora_state
    from verl_omni.config.model import read_architecture

    architecture = read_architecture(str(weights.model))
    if not weights.is_lora:
        raise ValueError(f"{weights.export} holds whole weights, no LoRA: --format kohya is for LoRA")
    if architecture not in kohya_keys.KNOWN:
        known = ", ".join(kohya_keys.KNOWN)
        raise ValueError(f"--format kohya: the keys of {architecture} are not known; it is for {known}")
    for file in sorted(weights.export.rglob(LORA_FILE)):  # one for each transformer that was trained
        part = file.parent.relative_to(weights.export)
        state, metadata = lora_state(file.parent, architecture)
        trained = weights.model / (part.name or "transformer")
        found = kohya_keys.as_kohya(architecture, state, alpha_of(metadata), partial(rows_of, trained))
        (out / part).mkdir(parents=True, exist_ok=True)
        save_file(found, out / part / LORA_FILE, metadata={"format": "pt"})


def alpha_of(metadata: dict | None) -> float | None:
    """As the file says; peft writes it with the transformer's name before it."""
    known = {key.removeprefix("transformer."): value for key, value in (metadata or {}).items()}
    return known.get("lora_alpha")


def rows_of(folder: Path, layer: str) -> int:
    """How many outputs a layer has, from the heads of a model's files."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if f"{layer}.weight" in tensors.keys():  # noqa: SIM118
                return tensors.get_slice(f"{layer}.weight").get_shape()[0]
    raise ValueError(f"{folder} has no layer {layer}")


def merged(weights: Weights, out: Path) -> None:
    """A copy of the model's folder with other weights in what was trained. Only that part is loaded."""
    import torch

    from verl_omni.cli.painter import load_trained
    from verl_omni.config import DiffusionModelConfig
    from verl_omni.pipelines.model_base import DiffusionModelBase
    from verl_omni.pipelines.model_folder import check_model_folder

    config = DiffusionModelConfig(path=str(weights.model))
    check_model_folder(config)
    adapter = DiffusionModelBase.get_class(config)
    parts = adapter.trained_modules(adapter.load_module(config, stored_dtype(weights.model, torch)))
    load_trained(weights, config.architecture, parts)
    shutil.copytree(weights.model, out, ignore=lambda place, names: [
        name for name in names if name in parts and Path(place) == weights.model
    ])  # fmt: skip
    for name, part in parts.items():
        if weights.is_lora:
            part.fuse_lora()
            part.unload_lora()
        part.save_pretrained(out / name)


def stored_dtype(model: Path, torch: "torch") -> "torch.dtype":
    """That of the model's own transformer, so that the merged one is as large."""
    from safetensors import safe_open

    file = next(iter(sorted((model / "transformer").glob("*.safetensors"))))
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(next(iter(tensors.keys()))).dtype


if __name__ == "__main__":
    main()
