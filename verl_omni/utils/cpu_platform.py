"""A CPU platform for verl, so that everything runs without an accelerator.

verl loads this module through the entry point group `verl.plugins`. It registers last and so is chosen only where verl
finds no accelerator, or where a run says so.
"""

import contextlib
import os
import types
from typing import Any

import torch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase

# verl imports VeOmni wherever it is installed, which would print its environment and every module that it spreads.
os.environ.setdefault("VEOMNI_VERBOSITY", "WARNING")


def _cpu_module() -> types.ModuleType:
    """`torch.cpu` with the few memory queries that verl makes of every device module."""
    module = types.ModuleType("verl_omni_cpu")
    module.__dict__.update({k: v for k, v in vars(torch.cpu).items() if not k.startswith("__")})
    zero = lambda *a, **k: 0  # noqa: E731
    nothing = lambda *a, **k: None  # noqa: E731
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, zero)
    for name in ("empty_cache", "reset_peak_memory_stats", "set_device", "manual_seed_all", "ipc_collect"):
        setattr(module, name, nothing)
    return module


@platform_manager.PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    _module = _cpu_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str):
        return contextlib.nullcontext()

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def tell_verl(device: str) -> None:
    """Here, and in processes that this one starts. By itself verl asks nvidia-smi, which sees hidden GPUs too."""
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
        platform_manager._current_platform = PlatformCPU()
    elif os.environ.get("VERL_PLATFORM") == "cpu":  # of a run before it
        del os.environ["VERL_PLATFORM"]
        platform_manager._current_platform = None


# Something may have asked for the platform before this module was loaded, and been given a GPU that is not there.
if platform_manager._current_platform is not None and not platform_manager._current_platform.is_available():
    if not torch.cuda.is_available():
        platform_manager._current_platform = None
