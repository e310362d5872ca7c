"""What vLLM and vLLM-Omni ask their plug-ins: where there is no accelerator, they compute on the CPU.

The entry points in pyproject.toml name these functions. Each is called in every process that loads vLLM.
"""

import torch

_DECLARED = torch.library.Library("_C", "FRAGMENT")
HERE = __name__.rpartition(".")[0]


def vllm_platform() -> str | None:
    return "vllm.platforms.cpu.CpuPlatform" if alone() else None


def omni_platform() -> str | None:
    return f"{HERE}.cpu_platform.OmniCpuPlatform" if alone() else None


def prepare() -> None:
    """Two things that vLLM-Omni's layers ask for in vain, though on a CPU they can do without."""
    if not alone():
        return
    from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl

    SDPAImpl.forward = SDPAImpl.forward_cuda  # it asks which accelerator there is; this is torch's own function
    for name in ("silu_and_mul", "gelu_new"):  # a build of vLLM without kernels; its CPU layers never call these
        if not hasattr(torch.ops._C, name):
            _DECLARED.define(f"{name}(Tensor! result, Tensor input) -> ()")


def alone() -> bool:
    """Without an accelerator."""
    return not torch.accelerator.is_available()
