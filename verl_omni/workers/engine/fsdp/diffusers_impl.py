"""FSDP2: diffusers transformers spread over ranks, with gloo on CPUs and NCCL on GPUs."""

import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from verl_omni.config import DiffusionActorConfig, FSDPConfig
from verl_omni.workers.engine.base import DiffusionEngine
from verl_omni.workers.engine.fsdp.shard import shard
from verl_omni.workers.engine.noise_levels import NoiseLevels
from verl_omni.workers.engine.reverse_steps import ReverseSteps

with warnings.catch_warnings():  # verl announces every engine whose package is not installed
    warnings.simplefilter("ignore")
    from verl.workers.engine.base import EngineRegistry


class DiffusersFSDPEngine(DiffusionEngine):
    """One rank trains the module as it is; several hold a share of each block, and gather it when it is used."""

    @classmethod
    def settings(cls, actor: DiffusionActorConfig) -> FSDPConfig:
        return actor.fsdp_config

    def spread(self) -> None:
        self.mesh = shard(self.parts, self.engine_config, self.device, self.dtype)

    @property
    def _shards(self) -> list[FSDPModule]:
        return [m for part in self.parts.values() for m in part.modules() if isinstance(m, FSDPModule)]

    def gather(self) -> None:
        for module in self._shards:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()

    def release(self) -> None:
        for module in self._shards:
            module.set_reshard_after_forward(self.engine_config.reshard_after_forward, recurse=False)
        self.settle()

    def settle(self) -> None:
        for module in self._shards:
            module.reshard()

    def begin_micro_batch(self, last: bool) -> None:
        for module in self._shards:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_is_last_backward(last)

    def sum_of_shards(self, squares: torch.Tensor) -> torch.Tensor:
        if self.sharded:
            dist.all_reduce(squares, group=self.mesh.get_group("fsdp"))
        return squares


@EngineRegistry.register(model_type="diffusion_model", backend="fsdp2", device=["cpu", "cuda"])
class PPODiffusersFSDPEngine(ReverseSteps, DiffusersFSDPEngine):
    """Policy gradient."""


@EngineRegistry.register(model_type="diffusion_preference_model", backend="fsdp2", device=["cpu", "cuda"])
class PreferenceDiffusersFSDPEngine(NoiseLevels, DiffusersFSDPEngine):
    """Direct preference."""
