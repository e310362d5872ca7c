"""The rollout engine on diffusers. Names are looked up when they are asked for: to import this costs nothing."""

import importlib
from typing import TYPE_CHECKING, Any

from verl_omni.workers.rollout import Listed

if TYPE_CHECKING:
    from verl_omni.workers.rollout.diffusers_rollout.engine import DiffusersRollout, copy_all

ENGINES = {"diffusers": Listed(f"{__name__}.engine.DiffusersRollout", f"{__name__}.server.DiffusersServer", forks=True)}
__all__ = ["ENGINES", "DiffusersRollout", "copy_all"]


def __getattr__(name: str) -> Any:
    if name not in ("DiffusersRollout", "copy_all"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.engine"), name)
