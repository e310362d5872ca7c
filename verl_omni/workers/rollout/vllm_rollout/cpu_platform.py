"""The CPU as a platform of vLLM-Omni, which has none of its own for it."""

import psutil
import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class OmniCpuPlatform(OmniPlatform, CpuPlatform):
    """What the diffusion engine asks of a device, beside what vLLM's own CPU platform and torch.cpu answer."""

    _omni_enum = OmniPlatformEnum.OOT
    device_name = "cpu"
    dist_backend = "gloo"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one."""

    @classmethod
    def synchronize(cls) -> None:
        """The host has done the work when a call returns."""

    @classmethod
    def empty_cache(cls) -> None:
        """There is none."""

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        return "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def init_diffusion_worker_vllm_config(cls, vllm_config: VllmConfig) -> None:
        """vLLM would compile single layers, for half a minute at the first sample."""
        vllm_config.compilation_config.mode = CompilationMode.NONE

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        return False

    # ---- memory: the host's, of which nobody keeps a peak --------------------------------------------

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    @classmethod
    def reset_peak_memory_stats(cls) -> None:
        """See above."""

    @classmethod
    def max_memory_reserved(cls) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls) -> int:
        return 0
