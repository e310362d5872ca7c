"""Write what a run has trained as files that other programs load.

    verl-omni export outputs/run lora/                      LoRA for diffusers: pipe.load_lora_weights("lora/")
    verl-omni export outputs/run lora/ --format kohya       LoRA with kohya's keys, as ComfyUI reads them
    verl-omni export outputs/run model/ --format merged     a whole model: DiffusionPipeline.from_pretrained("model/")
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl_omni.cli.trained import LORA_FILE, Weights, find_weights

if TYPE_CHECKING:
    import torch

# Where kohya's name of a layer is its place in diffusers' model: other programs give it another, in other models.
KOHYA = ("QwenImagePipeline", "QwenImageEditPlusPipeline")


def main() -> None:
    parser = argparse.ArgumentParser(
        "verl-omni export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", metavar="RUN|CHECKPOINT", help="a folder; of a run, its last checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--format", choices=("diffusers", "kohya", "merged"), default="diffusers", help="(%(default)s)")
    parser.add_argument("--model", metavar="DIR", help="the model that was trained, where it lies elsewhere now")
    options = parser.parse_args()
    out = Path(options.out).expanduser()
    if out.exists():
        sys.exit(f"error: {out} is there already: name a new folder")
    try:
        weights = find_weights(options.weights, options.model)
        if weights.export is None:
            raise ValueError(f"{options.weights} is a whole model already: there is nothing to export")
        {"diffusers": as_diffusers, "kohya": as_kohya, "merged": merged}[options.format](weights, out)
    except (OSError, ValueError) as error:
        shutil.rmtree(out, ignore_errors=True)  # the part that was written
        sys.exit(f"error: {error}")
    print(f"{weights.name} of {weights.export.parent.parent}: {out}")


def as_diffusers(weights: Weights, out: Path) -> None:
    shutil.copytree(weights.export, out)


def as_kohya(weights: Weights, out: Path) -> None:
    """lora_unet_<layer, with _ for .>.lora_down, .lora_up and .alpha, which a program divides by the rank."""
    import torch
    from safetensors.torch import save_file

    from verl_omni.cli.painter import lora_state
    from verl_omni.config.model import read_architecture

    architecture = read_architecture(str(weights.model))
    if not weights.is_lora:
        raise ValueError(f"{weights.export} holds whole weights, no LoRA: --format kohya is for LoRA")
    if architecture not in KOHYA:
        raise ValueError(f"--format kohya: the keys of {architecture} are not known; it is for {' and '.join(KOHYA)}")
    state, metadata = lora_state(weights.export, architecture)
    names = {"lora_A": "lora_down", "lora_B": "lora_up"}
    found: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        layer, side, _ = key.removeprefix("transformer.").rsplit(".", 2)
        kohya = f"lora_unet_{layer.replace('.', '_')}"
        found[f"{kohya}.{names[side]}.weight"] = tensor.contiguous()
        if side == "lora_A":
            found[f"{kohya}.alpha"] = torch.tensor(alpha_of(metadata, len(tensor)))
    out.mkdir(parents=True, exist_ok=True)
    save_file(found, out / LORA_FILE, metadata={"format": "pt"})


def alpha_of(metadata: dict | None, rank: int) -> float:
    """As the file says; peft writes it with the transformer's name before it."""
    known = {key.removeprefix("transformer."): value for key, value in (metadata or {}).items()}
    return float(known.get("lora_alpha") or rank)


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
