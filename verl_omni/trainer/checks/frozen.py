"""Whether weights of a user's folder can be a frozen policy beside the trained one, found before a worker starts."""

import dataclasses
from pathlib import Path

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.config.model import read_architecture
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.schedulers.flow_match_sde import own_levels
from verl_omni.utils.json_files import read_object
from verl_omni.utils.model_index import index_of
from verl_omni.workers.losses import build_loss_function

REF = "actor_rollout_ref.ref"


def check_reference(settings: DiffusionTrainerConfig) -> None:
    """A reference of the user's own is asked for, and is one."""
    arr = settings.actor_rollout_ref
    if arr.ref.path is None:
        return
    if not build_loss_function(arr.actor).needs_reference:
        raise ValueError(
            f'{REF}.path={arr.ref.path} has no effect: loss "{arr.actor.diffusion_loss.loss_mode}" compares with no '
            "reference as it is set; set actor_rollout_ref.actor.use_kl_loss=true, or leave it out"
        )
    check_folder(f"{REF}.path", Path(arr.ref.path).expanduser(), arr.model)
    if arr.ref.precision is not None and _has_own_module(arr.ref.path, arr.model):
        raise ValueError(
            f"{REF}.precision={arr.ref.precision} computes the layers of the trained model in 8 bits, and {REF}.path="
            f"{arr.ref.path} is a model of its own: leave the precision out"
        )


def check_folder(setting: str, folder: Path, model: DiffusionModelConfig) -> None:
    """It holds weights that can stand in for the trained ones, and steps as they do."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{setting}={folder} is no folder: give LoRA weights, a model or an export")
    transformer, lora = folder / model.transformer_subfolder, any(folder.glob("*.safetensors"))
    if not any(transformer.glob("*.safetensors")):
        if model.lora_rank and not lora:
            raise ValueError(
                f"{setting}={folder} holds no LoRA weights (*.safetensors) and no {model.transformer_subfolder}/"
                "*.safetensors: give an adapter of the same base, such as a run's global_step_N/export, or a model"
            )
        if not model.lora_rank:
            merged = "; merge the LoRA into its base: verl-omni export RUN OUT --format merged" if lora else ""
            raise ValueError(
                f"{setting}={folder} holds no {model.transformer_subfolder}/*.safetensors: where all weights are "
                f"trained, give a model's folder, or a run's global_step_N/export{merged}"
            )
    elif (transformer / "config.json").is_file():
        own = Path(model.config_path or model.path, model.transformer_subfolder, "config.json")
        theirs, ours = (read_object(file).get("_class_name") for file in (transformer / "config.json", own))
        if theirs != ours:
            raise ValueError(f"{setting}={folder} is a {theirs}, and the trained model a {ours}")
        _check_config(setting, folder, model)
    _check_schedule(setting, folder, model)


def _check_config(setting: str, folder: Path, model: DiffusionModelConfig) -> None:
    """It computes what the trained one computes, in as many blocks as it likes."""
    from verl_omni.workers.engine.frozen import DEPTH, differences

    for name, (theirs, ours) in differences(folder, model).items():
        if name not in DEPTH:
            raise ValueError(
                f"{setting}={folder} has {name}={theirs} in its transformer's config, and the trained model {ours}: "
                "they may differ in the number of blocks alone"
            )


def check_weights(settings: DiffusionTrainerConfig) -> None:
    """Of each frozen policy every tensor is there, in its shape. Of the modules only shapes are made."""
    from verl_omni.workers.engine.teachers import SETTING, teacher_folders

    arr = settings.actor_rollout_ref
    if arr.ref.path is not None:
        _check_fit(f"{REF}.path", arr.ref.path, arr.model)
    for folder in teacher_folders(arr.actor.teacher.path).values():
        _check_fit(SETTING, folder, arr.model, alone=arr.actor.teacher.ranks > 0)


def _check_fit(setting: str, path: str, model: DiffusionModelConfig, alone: bool = False) -> None:
    """`alone`: nothing that is trained is there, whose place it could take."""
    from verl_omni.workers.engine.frozen import own_config, stored, whole_config
    from verl_omni.workers.engine.module import build_module

    folder = Path(path).expanduser()
    config = whole_config(folder, model) if alone else own_config(folder, model)
    adapter = DiffusionModelBase.get_class(model)
    if adapter.loads_whole():
        if config is not None:
            instead = "leave teacher.n_gpus_per_node out" if alone else "give LoRA weights"
            raise ValueError(
                f"{setting}={folder} is a whole model, and {adapter.__name__} loads its own only: {instead}"
            )
        return  # the worker finds out
    _, parts = build_module(config or model, 0, torch.float32, None, empty=True)
    stored(config or model, parts, folder, setting)


def _has_own_module(path: str, model: DiffusionModelConfig) -> bool:
    from verl_omni.workers.engine.frozen import own_config

    return own_config(Path(path).expanduser(), model) is not None


def _check_schedule(setting: str, folder: Path, model: DiffusionModelConfig) -> None:
    """A model's folder says how it steps: as the trained one does. Weights alone step as that."""
    if not index_of(folder).is_file():
        return
    if (theirs := read_architecture(str(folder))) != model.architecture:
        raise ValueError(f"{setting}={folder} is a {theirs}, and the trained model a {model.architecture}")
    own, other = _schedule(model), _schedule(dataclasses.replace(model, path=str(folder)))
    if len(own) != len(other) or not torch.equal(own, other):
        raise ValueError(
            f"{setting}={folder} steps at other timesteps or sigmas than the trained model: {_few(other)} in place of "
            f"{_few(own)}; its scheduler's config has to be the same"
        )


def _schedule(model: DiffusionModelConfig) -> torch.Tensor:
    adapter = DiffusionModelBase.get_class(model)
    scheduler = adapter.build_scheduler(model)
    adapter.set_timesteps(scheduler, model, "cpu")
    return torch.cat([scheduler.timesteps.float(), own_levels(scheduler, scheduler.sigmas.float()).flatten()])


def _few(schedule: torch.Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in schedule[:4].tolist()) + ", ..."
