"""The module that is trained and rolled out, as training and rollout processes build it alike."""

import contextlib
import dataclasses

import torch

from verl_omni.config import DiffusionModelConfig, EngineConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.weights import fill
from verl_omni.utils.seeds import derive_seed
from verl_omni.workers.engine.compile.attention import choose_attention
from verl_omni.workers.engine.eight_bits import INT8, hold_in_8_bits, receivers
from verl_omni.workers.engine.export import load_lora
from verl_omni.workers.engine.lora import add_lora, base_name


def build_module(
    model_config: DiffusionModelConfig, seed: int, dtype: torch.dtype, attention: str | None, empty: bool = False
) -> tuple[torch.nn.Module, dict[str, torch.nn.Module]]:
    """(the module, the diffusers models in it that are trained), with its LoRA and attention kernels.

    What is to be read is on the meta device: `fill_module` gives it memory and values, when ranks have been told which
    part of it is theirs. LoRA has its first values, which every rank draws alike. `empty`: it is to be looked at only,
    and LoRA is on the meta device too.
    """
    adapter = DiffusionModelBase.get_class(model_config)
    torch.manual_seed(derive_seed(seed, "initial weights"))
    load = adapter.load_module if adapter.loads_whole() else adapter.build_module
    module = load(model_config, dtype)
    parts = adapter.trained_modules(module)
    if model_config.lora_rank > 0:
        add_lora(parts, model_config, adapter, empty)
    if model_config.lora_path and not empty:
        load_lora(model_config, parts)
    if model_config.base_precision == INT8:
        hold_in_8_bits(parts.values(), dtype)
    for part in parts.values():
        if model_config.enable_gradient_checkpointing:
            part.enable_gradient_checkpointing()
        if attention is not None:
            choose_attention(part, attention)
    return module, parts


def fill_module(
    module: torch.nn.Module,
    model_config: DiffusionModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    folder: str | None = None,
) -> None:
    """Read the model's weights, this rank's part of each, straight to `device`. `folder`: those of another one."""
    adapter = DiffusionModelBase.get_class(model_config)
    source = model_config if folder is None else dataclasses.replace(model_config, path=folder)
    if not adapter.loads_whole():
        for name, part in adapter.trained_modules(module).items():
            fill(part, adapter.named_tensors(source, name), device, dtype, base_name, receivers(part))
    nowhere = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if nowhere:
        raise ValueError(f"{adapter.__name__}.build_module has {nowhere[0]}, which is in none of its trained_modules")
    module.to(device)


def resolve_dtypes(common: EngineConfig, device: torch.device, lora: bool) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of the computation, dtype that the weights are held in)."""
    compute = getattr(torch, common.dtype) if common.dtype else (
        torch.float32 if device.type == "cpu" else torch.bfloat16
    )  # fmt: skip
    if common.model_dtype:
        held = getattr(torch, common.model_dtype)
        if compute == torch.float32 != held:
            raise ValueError(
                f"actor_rollout_ref.actor.engine.model_dtype={common.model_dtype}: such weights do not compute in "
                f"float32; set actor_rollout_ref.actor.engine.dtype={common.model_dtype} too"
            )
        return compute, held
    return compute, compute if lora else torch.float32


def rounds_alike(dtype: torch.dtype, compiled: bool, folded: bool, device: torch.device) -> bool:
    """Whether a pass without a gradient (and with LoRA folded into the weights or not) gives what one with it gives.

    A GPU that may round the factors of a product to TF32 does not: what another number of rows moves in the last bit
    may there be rounded to another number.
    """
    if dtype != torch.float32 or compiled or folded:
        return False
    # Says what was set, by this name or by the older ones, which cannot be asked after it was set by this one.
    return device.type != "cuda" or torch.backends.cuda.matmul.fp32_precision != "tf32"


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Compute in `dtype`, on one rank and on many alike."""
    return torch.autocast(device.type, dtype) if dtype != torch.float32 else contextlib.nullcontext()


def on_gpu(setting: bool | None, device: torch.device) -> bool:
    """A setting whose default is yes on a GPU and no on a CPU."""
    return device.type == "cuda" if setting is None else setting


def quiet_loading() -> None:
    """No progress bars for the loading of single files: the run has one of its own."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
