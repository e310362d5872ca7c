"""What a module's forward calls its arguments."""

import inspect
from typing import Any

import torch


def argument_names(module: torch.nn.Module) -> list[str]:
    """In order, the first one being the sample: diffusers calls it `hidden_states` in most transformers, not in all."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def by_name(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call."""
    return dict(zip(argument_names(module), args, strict=False)) | kwargs
