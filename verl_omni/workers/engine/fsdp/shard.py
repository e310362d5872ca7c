"""How a module is spread over ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from verl_omni.config import FSDPConfig
from verl_omni.workers.engine.compile.blocks import repeated_blocks


def shard(
    parts: dict[str, torch.nn.Module], config: FSDPConfig, device: torch.device, dtype: torch.dtype
) -> DeviceMesh:
    """FSDP2 over all ranks, or over groups of `fsdp_size` that hold copies of each other."""
    world = dist.get_world_size()
    size = world if config.fsdp_size == -1 else config.fsdp_size
    if world % size:
        raise ValueError(f"actor_rollout_ref.actor.fsdp_config.fsdp_size={size} does not divide the {world} ranks")
    shape, names = ((world,), ("fsdp",)) if size == world else ((world // size, size), ("ddp", "fsdp"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    # Inputs stay as they are, and autocast chooses: FSDP would round a timestep of 857.69 to 856 in bfloat16.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": config.reshard_after_forward}
    for part in parts.values():
        for block in repeated_blocks(part):
            fully_shard(block, **options)
        fully_shard(part, **options)
    return mesh
