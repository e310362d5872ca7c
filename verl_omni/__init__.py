"""Reinforcement learning for diffusion models on verl. Importing the package loads nothing heavy.

    import verl_omni

    run = verl_omni.train("Qwen/Qwen-Image", ["a red cube", ...], lambda image: ..., trainer={"total_epochs": 1})
"""

import importlib
from typing import Any

_NAMES = {
    "Callback": "verl_omni.trainer.callbacks",
    "Run": "verl_omni.api.run",
    "train": "verl_omni.api.training",
}

__all__ = ["Callback", "Run", "__version__", "train"]


def __getattr__(name: str) -> Any:
    """What is asked for is imported then."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("verl-omni")
        except PackageNotFoundError:  # a clone that is not installed
            return "0+unknown"
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
