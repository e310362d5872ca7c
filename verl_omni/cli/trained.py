"""Weights to draw with: a model's folder, or what a run has trained on top of one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_omni.utils import hub
from verl_omni.utils.model_index import index_of

LORA_FILE = "pytorch_lora_weights.safetensors"  # as diffusers calls it
FULL_FILES = "diffusion_pytorch_model*.safetensors"  # one, or several of a large model


@dataclass(frozen=True)
class Weights:
    name: str  # for a person
    model: Path  # a whole model in diffusers' layout
    export: Path | None = None  # what replaces its transformer or is added to it
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run, where there is one
    rewriter: Path | None = None  # a language model that the run trained with it

    def setting(self, name: str, default: Any = None) -> Any:
        found: Any = self.settings
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None else found

    @property
    def is_lora(self) -> bool:
        return self.export is not None and (self.export / LORA_FILE).is_file()


def find_weights(place: str | Path, model: str | Path | None = None) -> Weights:
    """A model's folder, a run (its last checkpoint), RUN/best, one of its checkpoints, or an `export` folder."""
    from verl_omni.trainer.run_folder.checkpointing import best_step, whole_checkpoints
    from verl_omni.utils.run_files import read_config

    folder = Path(place).expanduser()
    if folder.name == "best" and not folder.exists() and folder.parent.is_dir():
        step = best_step(folder.parent)
        if step is None:
            raise FileNotFoundError(f"{folder.parent} keeps no best checkpoint: a run with trainer.keep_best=true does")
        place = folder.parent / f"global_step_{step}"
    folder = Path(hub.model_folder(str(place), setting="the model")).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is no folder: name that of a run, of one of its checkpoints, or of a model, or a model on the "
            "Hugging Face hub"
        )
    if index_of(folder).is_file():
        return Weights(hub.shown_name(folder), folder)
    if saved := list(whole_checkpoints(folder).values()):
        folder = saved[-1]
    export = folder / "export" if (folder / "export").is_dir() else folder
    rewriter = folder / "rewriter/export"
    if rewriter.is_dir() and not (folder / "export").is_dir():
        raise FileNotFoundError(f"{folder} draws nothing: what it has trained writes texts, and is in {rewriter}")
    if not (export / LORA_FILE).is_file() and not any(export.glob(f"*/{FULL_FILES}")):
        raise FileNotFoundError(
            f"{folder} holds no weights: expected a run with checkpoints, global_step_N with an export, or a model in "
            "diffusers' layout"
        )
    step = export.parent if export.name == "export" else export
    config = step.parent / "config.yaml"
    settings = read_config(config) if config.is_file() else {}
    beside = step / "rewriter/export"
    found = Weights(
        step.name.replace("global_step_", "step "), Path(), export, settings, beside if beside.is_dir() else None
    )
    known = str(model) if model else found.setting("actor_rollout_ref.model.path")
    revision = None if model else found.setting("actor_rollout_ref.model.revision")
    base = Path(hub.model_folder(known, revision, setting="--model")).expanduser() if known else None
    if base is None or not base.is_dir():
        raise FileNotFoundError(f"{export} was trained on {known or 'a model'}, which is not here: add --model DIR")
    return replace(found, model=base)


def drawing_settings(weights: Weights) -> dict[str, Any]:
    """Size, steps and guidance as the run's validation had them; nothing where there was no run."""
    rollout = weights.setting("actor_rollout_ref.rollout", {})
    training, validation = rollout.get("pipeline") or {}, (rollout.get("val_kwargs") or {}).get("pipeline") or {}
    return {**training, **{key: value for key, value in validation.items() if value is not None}}
