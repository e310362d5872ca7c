"""Benchmarks of the real training step, on models of the real size with random weights."""

import importlib.util
import sys

# torchao begins to use CUDA when it is imported, as diffusers and transformers do wherever they find it, and then no
# fork can use CUDA any more.
sys.modules.setdefault("torchao", None)


def find_torchao() -> bool:
    """Whether it is installed; from now on it can be imported."""
    if "torchao" in sys.modules and sys.modules["torchao"] is None:
        del sys.modules["torchao"]
    return importlib.util.find_spec("torchao") is not None
