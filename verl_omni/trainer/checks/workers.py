"""What a worker would stumble over after a minute, tried here before one starts: the same calls, on nothing."""

import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import torch

from verl_omni.config import (
    DiffusionActorConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionRolloutConfig,
    EngineConfig,
    OptimizerConfig,
    validation_pipeline,
)
from verl_omni.config.actor import AUTO
from verl_omni.config.schema import DiffusionTrainerConfig, TrainerConfig
from verl_omni.data.prompt_rows import SIZES
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.utils import read_component_config, read_index
from verl_omni.utils.suggest import unknown

OPTIM, ENGINE, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor.optim", "actor.engine", "model"))
# What peft can put an adapter on.
ADAPTABLE = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
# The package of a tracker, where it is not called like the tracker or is none of ours.
PACKAGES = {"console": None, "jsonl": None, "file": None, "vemlp_wandb": "volcengine_ml_platform"}


def check_workers(settings: DiffusionTrainerConfig) -> None:
    from verl_omni.workers.engine.compile.attention_kernels import FLASH_4
    from verl_omni.workers.engine.registry import engine_class, layout_of  # a typing error is told before verl is there
    from verl_omni.workers.rollout import engine_class as rollout_engine

    arr, trainer = settings.actor_rollout_ref, settings.trainer
    check_trackers(trainer)
    check_folder(trainer)
    check_optimizer(arr.actor.optim)
    servers = not arr.hybrid_engine
    layout = layout_of(settings)  # the engine refuses ranks that it cannot divide
    ranks = layout.world
    mini, n = arr.actor.ppo_mini_batch_size, arr.rollout.n
    if settings.algorithm.sample_source == "online" and (mini * n) % layout.data:
        shared = f" of {layout.sequence} devices each" if layout.sequence > 1 else ""
        raise ValueError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size * actor_rollout_ref.rollout.n = {mini} * {n} images do not "
            f"divide among {layout.data} {'groups' if shared else 'devices'}{shared}"
        )
    # Without a device said, as in a plan for other machines, nobody knows.
    on_a_cpu = trainer.device == "cpu" and arr.actor.engine.use_torch_compile is None
    each_has_all = ranks > 1 and layout.parts == 1
    idle = {
        "fold_lora": {
            "without LoRA (model.lora_rank=0)": arr.model.lora_rank == 0,
            "beside rollout servers": servers,
            f"with actor_rollout_ref.rollout.name={arr.rollout.name}, which draws with a copy of its own": (
                rollout_engine(arr.rollout.name).has_a_copy
            ),
            f"where each of {ranks} ranks holds the whole weights (fsdp_size=1)": each_has_all,
        },
        "compile_ahead": {
            f"with actor_rollout_ref.actor.strategy={arr.actor.strategy} over the {ranks} ranks": (
                ranks > 1 and not engine_class(arr.actor.strategy).compiles_ahead
            ),
            "where ranks share samples, whose blocks are not compiled": layout.sequence > 1,
            "without compiled blocks (use_torch_compile=false)": arr.actor.engine.use_torch_compile is False,
            "on a CPU, where blocks are compiled with use_torch_compile=true only": on_a_cpu,
            "with ppo_micro_batch_size_per_gpu=auto, which is found after the first rollout": (
                arr.actor.ppo_micro_batch_size_per_gpu == AUTO
            ),
        },
    }
    for name, reasons in idle.items():
        for why, holds in reasons.items():
            if getattr(arr.actor.engine, name) and holds:
                raise ValueError(f"{ENGINE}.{name}=true does nothing {why}: leave it null")
    check_memory_budget(settings)
    if settings.algorithm.sample_source == "online":
        check_engine_arguments(arr.rollout)
    if trainer.device == "cpu" and arr.actor.engine.attention_backend == FLASH_4:
        raise ValueError(f"{ENGINE}.attention_backend={FLASH_4} computes on a GPU only: leave it out")
    check_base_precision(settings)
    check_model(arr.model, arr.actor.engine)
    check_training_engine(arr.model, arr.actor)
    if arr.rollout.share_samples and settings.data.val_files is not None:
        whose = " (validation's, which is drawn with actor_rollout_ref.rollout.share_samples=true too)"
        check_even(validation_pipeline(arr.rollout), arr.model, arr.actor, whose)


def check_memory_budget(settings: DiffusionTrainerConfig) -> None:
    """Blocks are compiled, and keep something that they could compute again."""
    arr = settings.actor_rollout_ref
    budget, compiles = arr.actor.engine.activation_memory_budget, arr.actor.engine.use_torch_compile
    reasons = {
        "where no generator is trained": arr.rewriter.train == "rewriter",
        "without compiled blocks (use_torch_compile=false)": compiles is False,
        "on a CPU, where blocks are compiled with use_torch_compile=true only": (
            settings.trainer.device == "cpu" and compiles is None
        ),
        "where ranks share samples, whose blocks are not compiled": shared_by(arr.actor)[0] > 1,
        "with enable_gradient_checkpointing=true, where a block is computed again as a whole": (
            arr.model.enable_gradient_checkpointing
        ),
        "with ppo_micro_batch_size_per_gpu=auto, which is found with blocks that are not compiled": (
            arr.actor.ppo_micro_batch_size_per_gpu == AUTO
        ),
    }
    for why, holds in reasons.items():
        if budget < 1 and holds:
            raise ValueError(f"{ENGINE}.activation_memory_budget={budget:g} gains nothing {why}: leave it out")


def check_trackers(trainer: TrainerConfig) -> None:
    """Someone hears of the run, and the packages of all that do are installed."""
    if not trainer.logger:
        raise ValueError("trainer.logger=[] would leave no trace of the metrics: name one, such as [console,jsonl]")
    for name in trainer.logger:
        package = PACKAGES.get(name, name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ValueError(f"trainer.logger has {name}, which is not installed here: pip install {package}")


def check_folder(trainer: TrainerConfig) -> None:
    """The run's folder can be made and written to."""
    folder = Path(trainer.default_local_dir).expanduser()
    where = f'trainer.default_local_dir="{_short(folder)}"'
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
        found = there.stat()
    except OSError as error:  # a name that is too long, a link that leads nowhere or to itself
        raise ValueError(f"{where} cannot be made or opened: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{where}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{where}: {there} cannot be written to")


def _short(path: Path) -> str:
    return str(path) if len(str(path)) <= 100 else f"{str(path)[:100]}..."


def check_optimizer(config: OptimizerConfig) -> None:
    """torch takes these arguments, and the optimizer reads them."""
    from verl_omni.workers.engine.optimizer import build_optimizer

    if len(config.betas) != 2:
        raise ValueError(f"{OPTIM}.betas={list(config.betas)}: expected two numbers, such as [0.9,0.999]")
    if "Adam" not in config.optimizer:
        default = OptimizerConfig()
        for name in ("betas", "eps"):
            if getattr(config, name) != getattr(default, name):
                raise ValueError(
                    f"{OPTIM}.{name}={getattr(config, name)} has no effect with {OPTIM}.optimizer={config.optimizer}: "
                    "leave it out"
                )
    filled = dataclasses.replace(config, total_training_steps=config.total_training_steps or 1)
    build_optimizer([torch.nn.Parameter(torch.zeros(1, 1))], filled, torch.device("cpu"))


def check_engine_arguments(rollout: DiffusionRolloutConfig) -> None:
    """`engine_kwargs` are arguments that the engine has, beside those that it gets anyway: whole numbers."""
    from verl_omni.workers.rollout import engine_class

    where, engine = "actor_rollout_ref.rollout.engine_kwargs", engine_class(rollout.name)
    known = [p.name for p in inspect.signature(engine).parameters.values() if type(p.default) is int]
    for name, value in rollout.engine_kwargs.items():
        if name not in known:
            raise ValueError(unknown(where, name, known))
        least = 0 if name == "prompt_cache_size" else 1  # without a cache a prompt is encoded once a rollout
        if type(value) is not int or value < least:
            raise ValueError(f"{where}.{name}={value}: expected a whole number, {least} or more")


def check_base_precision(settings: DiffusionTrainerConfig) -> None:
    """Training and rollout hold the same weights, and hold them once, in layers that can be held so."""
    from verl_omni.workers.engine.eight_bits import layers_for_8_bits
    from verl_omni.workers.engine.registry import engine_class
    from verl_omni.workers.rollout import engine_class as rollout_engine

    arr = settings.actor_rollout_ref
    if arr.model.base_precision is None:
        return
    shown = f"{MODEL}.base_precision={arr.model.base_precision}"
    if arr.actor.engine.fold_lora:
        raise ValueError(f"{shown}: {ENGINE}.fold_lora=true folds into weights in full; leave one of the two out")
    if not engine_class(arr.actor.strategy).holds_8_bits:
        where = f"actor_rollout_ref.actor.strategy={arr.actor.strategy}"
        raise ValueError(f"{shown}: {where} holds weights in full; set strategy=fsdp2, or leave base_precision out")
    if settings.algorithm.sample_source == "online" and not rollout_engine(arr.rollout.name).holds_8_bits:
        raise ValueError(
            f"{shown}: actor_rollout_ref.rollout.name={arr.rollout.name} holds weights in full, and would draw with "
            "others than training has; set rollout.name=diffusers, or leave base_precision out"
        )
    if parts := empty_modules(arr.model):
        layers_for_8_bits(parts, torch.get_default_dtype())


def check_model(model: DiffusionModelConfig, engine: EngineConfig) -> None:
    """LoRA finds its layers and its file, and attention its kernel. Builds the modules without their weights."""
    if model.lora_path is not None:
        check_lora_file(model)
    if model.lora_rank:
        check_takes_lora(model)
    if model.target_modules is None and engine.attention_backend is None:
        return
    for part in empty_modules(model):
        if model.target_modules is not None:
            check_targets(model.target_modules, part)
        if engine.attention_backend is not None:
            check_attention(part, engine.attention_backend)


def check_takes_lora(model: DiffusionModelConfig) -> None:
    import diffusers

    name = read_component_config(model.config_path or model.path, model.transformer_subfolder).get("_class_name", "")
    if not hasattr(getattr(diffusers, name, None), "add_adapter") and hasattr(diffusers, name):
        raise ValueError(
            f"{MODEL}.lora_rank={model.lora_rank}: diffusers' {name} takes no LoRA; train all its weights, lora_rank=0"
        )


def empty_modules(model: DiffusionModelConfig) -> list[torch.nn.Module]:
    """The trained modules on torch's meta device: a second even for billions of parameters."""
    import diffusers

    first, *others = DiffusionModelBase.get_class(model).trained_components
    index = read_index(model.path)
    parts = []
    for name in (model.transformer_subfolder or first, *(other for other in others if index.get(other, [None])[0])):
        config = read_component_config(model.config_path or model.path, name)
        if hasattr(diffusers, config.get("_class_name", "")):  # a class of the user's own is the adapter's business
            parts.append(_empty_module(config["_class_name"], json.dumps(dict(config))))
    return parts


@functools.lru_cache(maxsize=2)  # a model is asked several questions
def _empty_module(name: str, config: str) -> torch.nn.Module:
    import diffusers
    from diffusers.models.modeling_utils import no_init_weights

    with no_init_weights(), torch.device("meta"):
        return getattr(diffusers, name).from_config(json.loads(config))


def check_training_engine(model: DiffusionModelConfig, actor: DiffusionActorConfig) -> None:
    """It can train the model, and ranks that share samples have equal shares of them."""
    from verl_omni.workers.engine.registry import engine_class

    engine_class(actor.strategy).check(actor, DiffusionModelBase.get_class(model), lambda: empty_modules(model))
    ranks, where = shared_by(actor)
    if ranks > 1:
        _check_shares(model, actor, empty_modules(model), ranks, where)


def _check_shares(
    model: DiffusionModelConfig,
    actor: DiffusionActorConfig,
    parts: list[torch.nn.Module],
    ranks: int,
    where: str,
) -> None:
    if actor.engine.use_torch_compile:
        raise ValueError(f"{ENGINE}.use_torch_compile=true does not go with {where}: leave it null")
    adapter = DiffusionModelBase.get_class(model)
    if not adapter.shares_tokens:
        raise ValueError(f"{where}: the tokens of a {model.architecture} are not shared by ranks; set it to 1")
    for part in parts:
        if part.config.num_attention_heads % ranks:
            heads = part.config.num_attention_heads
            raise ValueError(f"{where} does not divide the {heads} attention heads of {type(part).__name__}")
    check_even(model.pipeline, model, actor)


def check_even(
    pipeline: DiffusionPipelineConfig, model: DiffusionModelConfig, actor: DiffusionActorConfig, whose: str = ""
) -> None:
    """Ranks that share samples have equal shares of one of this size."""
    ranks, where = shared_by(actor)
    if ranks == 1:
        return
    tokens = DiffusionModelBase.get_class(model).shared_tokens(dataclasses.replace(model, pipeline=pipeline))
    if tokens % ranks:
        size = {k: v for k, v in dataclasses.asdict(pipeline).items() if k in SIZES and v is not None}
        said = " ".join(f"{name}={value}" for name, value in size.items()) + whose
        raise ValueError(f"{where} does not divide the {tokens} tokens of a sample of {said}: choose another size")


def shared_by(actor: DiffusionActorConfig) -> tuple[int, str]:
    """How many ranks share each sample, and the setting that says so."""
    from verl_omni.workers.engine.registry import engine_class

    engine = engine_class(actor.strategy)
    return engine.shared_by(engine.settings(actor))


def check_targets(targets: Any, part: torch.nn.Module) -> None:
    """Every name is that of a layer, or the end of one; a string is a regular expression for whole names."""
    layers = [name for name, module in part.named_modules() if isinstance(module, ADAPTABLE)]
    if isinstance(targets, str):
        if targets != "all-linear" and not any(re.fullmatch(targets, layer) for layer in layers):
            raise ValueError(
                f"{MODEL}.target_modules={targets} matches no layer of {type(part).__name__}: a string is a regular "
                f"expression for whole names, such as {layers[-1]}; several names are a list"
            )
        return
    for target in targets:
        if not any(layer == target or layer.endswith(f".{target}") for layer in layers):
            ends = {re.search(r"[^.]+(\.\d+)?$", layer)[0] for layer in layers}
            raise ValueError(unknown(f"{MODEL}.target_modules", target, ends))


def check_attention(part: torch.nn.Module, backend: str) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    from verl_omni.workers.engine.compile.attention import choose_attention

    try:
        with attention_backend("native"):  # diffusers makes a model's choice that of the whole process
            choose_attention(part, backend)
    except (ImportError, RuntimeError) as error:  # a package that is missing
        raise ValueError(f"{ENGINE}.attention_backend={backend}: {error}") from error


def check_lora_file(model: DiffusionModelConfig) -> None:
    """There are LoRA tensors of this rank in the folder."""
    from safetensors import safe_open

    where, root = f'{MODEL}.lora_path="{model.lora_path}"', Path(model.lora_path).expanduser()
    files = sorted(root.glob("*.safetensors")) if root.is_dir() else [root]
    if not files or not files[0].is_file():
        raise ValueError(f"{where} holds no LoRA: expected a folder with pytorch_lora_weights.safetensors")
    try:
        with safe_open(files[0], "pt") as tensors:
            ranks = {tensors.get_slice(key).get_shape()[0] for key in tensors.keys() if "lora_A" in key}  # noqa: SIM118
    except Exception as error:  # noqa: BLE001  (its class is safetensors' own)
        raise ValueError(f"{where}: {files[0].name} is no readable safetensors file: {error}") from error
    if ranks != {model.lora_rank}:
        found = f"rank {sorted(ranks)}" if ranks else "none"
        raise ValueError(f"{where} has LoRA of {found}, and {MODEL}.lora_rank={model.lora_rank}: set the file's rank")
