"""How a module is spread over ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from verl_omni.workers.engine.compile.blocks import repeated_blocks
from verl_omni.workers.layout import Layout


def shard(parts: dict[str, torch.nn.Module], mesh: DeviceMesh, dtype: torch.dtype, reshard: bool) -> None:
    """FSDP2: each block, and what is around them."""
    options = {"mesh": mesh, "mp_policy": precision(dtype), "reshard_after_forward": reshard}
    for part in parts.values():
        for block in repeated_blocks(part):
            fully_shard(block, **options)
        fully_shard(part, **options)


def precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    # Inputs stay as they are, and autocast chooses: FSDP would round a timestep of 857.69 to 856 in bfloat16.
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def shard_alone(block: torch.nn.Module, dtype: torch.dtype) -> None:
    """One block in a process without other ranks: what it computes with is what it has among them."""
    kind = next(block.parameters()).device.type
    if not dist.is_initialized():
        backend = "gloo" if kind == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    fully_shard(block, mesh=Layout().weights(kind), mp_policy=precision(dtype))
