"""How a module is spread over ranks."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from verl_omni.workers.engine.compile.blocks import repeated_blocks


def shard(parts: dict[str, torch.nn.Module], mesh: DeviceMesh, dtype: torch.dtype, reshard: bool) -> None:
    """FSDP2: each block, and what is around them."""
    # Inputs stay as they are, and autocast chooses: FSDP would round a timestep of 857.69 to 856 in bfloat16.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard}
    for part in parts.values():
        for block in repeated_blocks(part):
            fully_shard(block, **options)
        fully_shard(part, **options)
