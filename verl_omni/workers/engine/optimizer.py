"""The optimizer and its learning-rate schedule."""

import functools
import inspect
import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from verl_omni.config import OptimizerConfig
from verl_omni.workers.host_memory import local


def build_optimizer(
    parameters: list[torch.nn.Parameter], config: OptimizerConfig, device: torch.device
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    if not hasattr(torch.optim, config.optimizer):
        raise ValueError(f'optim.optimizer="{config.optimizer}" is no class of torch.optim, such as AdamW')
    kind = getattr(torch.optim, config.optimizer)
    arguments = {"lr": config.lr, "weight_decay": config.weight_decay}
    if "Adam" in config.optimizer:
        arguments |= {"betas": tuple(config.betas), "eps": config.eps}
    can_fuse = "fused" in inspect.signature(kind).parameters
    if config.fused and not can_fuse:
        raise ValueError(f"optim.fused=true: torch has no fused {config.optimizer}")
    if can_fuse:
        arguments["fused"] = device.type == "cuda" if config.fused is None else config.fused
    optimizer = kind(parameters, **arguments)
    return optimizer, LambdaLR(optimizer, lr_factor(config))


def lr_factor(config: OptimizerConfig) -> Callable[[int], float]:
    """Linear warm-up, then constant, linear to 0 or half a cosine to 0."""
    if config.lr_scheduler_type not in ("constant", "linear", "cosine"):
        raise ValueError(f'optim.lr_scheduler_type="{config.lr_scheduler_type}": expected constant, linear or cosine')
    if config.lr_scheduler_type != "constant" and not config.total_training_steps:
        raise ValueError(f"a {config.lr_scheduler_type} learning rate needs optim.total_training_steps")

    def factor(step: int) -> float:
        if step < config.lr_warmup_steps:
            return (step + 1) / config.lr_warmup_steps
        if config.lr_scheduler_type == "constant":
            return 1.0
        span = max(1, config.total_training_steps - config.lr_warmup_steps)
        done = min(1.0, (step - config.lr_warmup_steps) / span)
        return 1.0 - done if config.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * done))

    return factor


def set_schedule(scheduler: LambdaLR, steps: int) -> None:
    """As after so many optimizer steps. The rates are this run's own, whatever an earlier part of it had."""
    scheduler.last_epoch, scheduler._step_count = steps, steps + 1
    rates = [base * factor(steps) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def optimizer_ratio(config: OptimizerConfig) -> float:
    """Bytes of state that the optimizer keeps, a byte of parameters: asked of it."""
    return _ratio(config.optimizer, config.weight_decay)


def state_to_come(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> float:
    """Bytes of what it will make in its first step."""
    new = (p for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p))
    return optimizer_ratio(config) * sum(local(p).nbytes for p in new)


def gradients_to_come(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of those that there are not now. They stay from one step to the next."""
    new = (p for group in optimizer.param_groups for p in group["params"] if p.grad is None)
    return float(sum(local(p).nbytes for p in new))


@functools.cache
def _ratio(name: str, weight_decay: float) -> float:
    parameter = torch.nn.Parameter(torch.zeros(256, 256))
    parameter.grad = torch.zeros_like(parameter)
    config = OptimizerConfig(optimizer=name, weight_decay=weight_decay)
    optimizer, _ = build_optimizer([parameter], config, torch.device("cpu"))
    optimizer.step()
    state = optimizer.state[parameter].values()
    return sum(v.nbytes for v in state if isinstance(v, torch.Tensor) and v.ndim) / parameter.nbytes
