"""Names on the Hugging Face hub in a run's settings: each stands for one commit, on every machine and on every day."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_omni.pipelines.model_folder import check_model_folder
from verl_omni.utils import hub
from verl_omni.utils.run_files import read_config

MODEL, REVISION = "actor_rollout_ref.model.path", "actor_rollout_ref.model.revision"
# These say their revision behind an @.
OTHERS = (
    *(f"actor_rollout_ref.model.{name}" for name in ("tokenizer_path", "config_path", "lora_path")),
    "actor_rollout_ref.rewriter.path",
    "reward.reward_model.model_path",
)
DATA = ("data.train_files", "data.val_files")


def pinned_names(config: DictConfig) -> DictConfig:
    """The same settings, in which every name of the hub says its commit."""
    path, revision = (OmegaConf.select(config, name) for name in (MODEL, REVISION))
    if path and hub.named(path, revision):
        name, _, behind = path.partition("@")
        _set(config, {MODEL: name, REVISION: hub.pinned(name, revision or behind or _noted(config, name), MODEL)})
    elif revision is not None:
        raise ValueError(f"{REVISION}={revision} has no effect: {MODEL}={path} is no name on the hub; leave it out")
    for setting in OTHERS:
        given = OmegaConf.select(config, setting)
        if given and hub.named(given):
            _set(config, {setting: f"{given.partition('@')[0]}@{hub.pinned(given, setting=setting)}"})
    for setting in DATA:
        given = OmegaConf.select(config, setting)
        if isinstance(given, list | ListConfig):
            _set(config, {setting: [hub.pin_data(one, setting) if hub.is_data(one) else one for one in given]})
        elif hub.is_data(given):
            _set(config, {setting: hub.pin_data(given, setting)})
    return config


def with_names(config: DictConfig, known: DictConfig) -> DictConfig:
    """Settings as they were named: the folder of a copy is another one on another machine."""
    _set(config, {setting: OmegaConf.select(known, setting) for setting in (MODEL, *OTHERS)})
    return config


def models_of(config: DictConfig) -> list[str]:
    """Those that are named on the hub, as `name@commit`."""
    path, revision = (OmegaConf.select(config, name) for name in (MODEL, REVISION))
    found = [f"{path}@{revision}"] if path and hub.named(path, revision) else []
    return found + [given for name in OTHERS if (given := OmegaConf.select(config, name)) and hub.named(given)]


def fetch_models(config: DictConfig) -> None:
    """What the hub has of them comes to this machine, and is whole, before anything else of the run starts."""
    if models_of(config):
        check_model_folder(OmegaConf.to_object(config.actor_rollout_ref.model))
        fetch(models_of(config))


def fetch(names: list[str]) -> None:
    """To this machine."""
    for name in names:
        hub.fetch_weights(hub.model_folder(name, weights=False))


def _noted(config: DictConfig, name: str) -> str | None:
    """The commit of the run that this one goes on with, where no other is asked for."""
    file = Path(config.trainer.default_local_dir).expanduser() / "config.yaml"
    if config.trainer.resume_mode == "disable" or not file.is_file():
        return None
    before = read_config(file).get("actor_rollout_ref", {}).get("model", {})
    return before.get("revision") if before.get("path") == name else None


def _set(config: DictConfig, values: dict[str, Any]) -> None:
    for name, value in values.items():
        OmegaConf.update(config, name, value, merge=False, force_add=True)
