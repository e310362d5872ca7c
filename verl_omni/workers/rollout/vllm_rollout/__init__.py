"""The rollout engine on vLLM-Omni, and the names that other documents give it.

vllm is an extra: it is imported when an engine is built. Names are looked up when they are asked for, so that importing
this package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from verl_omni.workers.rollout import Listed

if TYPE_CHECKING:
    from verl_omni.workers.rollout.vllm_rollout.http_server import vLLMOmniHttpServer
    from verl_omni.workers.rollout.vllm_rollout.replica import vLLMOmniReplica

ENGINES = {"vllm_omni": Listed(f"{__name__}.engine.VllmOmniRollout", f"{__name__}.server.VllmOmniServer")}
_MODULES = {"vLLMOmniHttpServer": "http_server", "vLLMOmniReplica": "replica"}
__all__ = ["ENGINES", "vLLMOmniHttpServer", "vLLMOmniReplica"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
