"""Prompts, offline pairs, and their preparation.

Names are looked up when they are asked for: a process that only opens images does without the loaders' libraries.
"""

import importlib
from typing import Any

_LOADER = "verl_omni.data.prompt_loader"
_HOMES = {
    "PromptDataLoader": _LOADER,
    "PromptDataset": "verl_omni.data.prompt_dataset",
    "collate_fn": _LOADER,
    "create_dataloader": _LOADER,
    "create_val_dataloader": _LOADER,
    "steps_for_epochs": _LOADER,
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
