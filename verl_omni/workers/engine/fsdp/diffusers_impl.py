"""FSDP2: diffusers transformers spread over ranks, with gloo on CPUs and NCCL on GPUs."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from verl_omni.config import DiffusionActorConfig, FSDPConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers.engine.base import MODEL_TYPE, DiffusionEngine
from verl_omni.workers.engine.fsdp.in_step import InStep
from verl_omni.workers.engine.fsdp.shard import shard, shard_alone
from verl_omni.workers.engine.fsdp.together import Together
from verl_omni.workers.layout import Layout

with warnings.catch_warnings():  # verl announces every engine whose package is not installed
    warnings.simplefilter("ignore")
    from verl.workers.engine.base import EngineRegistry


SHARE = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"


def divided(world: int, shard_group: tuple[str, int], sequence: tuple[str, int]) -> Layout:
    """So many ranks in groups of one copy of the weights, and in those that share samples; each by its setting."""
    name, size = shard_group[0], world if shard_group[1] == -1 else shard_group[1]
    if world % size:
        raise ValueError(f"{name}={size} does not divide the {world} ranks (trainer.nnodes * n_gpus_per_node)")
    if size % sequence[1]:
        raise ValueError(
            f"{sequence[0]}={sequence[1]} does not divide the {size} ranks that share the weights (fsdp_size, or "
            "trainer.nnodes * n_gpus_per_node)"
        )
    return Layout(replicate=world // size, shard=size // sequence[1], sequence=sequence[1])


@EngineRegistry.register(model_type=MODEL_TYPE, backend="fsdp2", device=["cpu", "cuda"])
class DiffusersFSDPEngine(DiffusionEngine):
    """One rank trains the module as it is; several hold a share of each block, and gather it when it is used."""

    draws_by_blocks = draws_together = compiles_ahead = holds_8_bits = True
    not_counted = None

    @classmethod
    def settings(cls, actor: DiffusionActorConfig) -> FSDPConfig:
        return actor.fsdp_config

    @classmethod
    def lay_out(cls, engine_config: FSDPConfig, world: int) -> Layout:
        return divided(
            world,
            ("actor_rollout_ref.actor.fsdp_config.fsdp_size", engine_config.fsdp_size),
            (SHARE, engine_config.ulysses_sequence_parallel_size),
        )

    @classmethod
    def check(
        cls,
        actor: DiffusionActorConfig,
        adapter: type[DiffusionModelBase],
        parts: Callable[[], Sequence[torch.nn.Module]],
    ) -> None:
        """diffusers can cut the model's samples."""
        ranks, where = cls.shared_by(cls.settings(actor))
        for part in parts() if ranks > 1 else ():
            if adapter.token_plan(part) is None:
                raise ValueError(f"{where}: diffusers has no plan for the tokens of {type(part).__name__}; set it to 1")

    @classmethod
    def shared_by(cls, engine_config: FSDPConfig) -> tuple[int, str]:
        ranks = engine_config.ulysses_sequence_parallel_size
        return ranks, f"{SHARE}={ranks}"

    @classmethod
    def frees_gathered(cls, engine_config: FSDPConfig) -> bool:
        return engine_config.reshard_after_forward

    @property
    def reshards(self) -> bool:
        return self.frees_gathered(self.engine_config)

    def spread(self) -> None:
        self.mesh = self.layout.weights(self.device.type)
        shard(self.parts, self.mesh, self.dtype, self.reshards)
        if self.shares_samples:
            from verl_omni.workers.engine.sequence import SharedSequence  # the driver has no use for diffusers' hooks

            plans = {part: self.adapter.token_plan(part) for part in self.parts.values()}
            self.sequence = SharedSequence(plans, self.layout, self.device)
            for module in self._shards:  # the mean over samples of the sum over the ranks that share one
                module.set_gradient_divide_factor(self.layout.data)
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    def as_spread(self) -> Callable[[torch.nn.Module], None] | None:
        return functools.partial(shard_alone, dtype=self.dtype) if self.layout.is_spread else None

    @functools.cached_property
    def _shards(self) -> list[FSDPModule]:
        """Not before they are spread. To look through FLUX with LoRA takes the host as long as gathering ten blocks."""
        return [m for part in self.parts.values() for m in part.modules() if isinstance(m, FSDPModule)]

    @property
    def rounds_like_rollout(self) -> bool:
        return super().rounds_like_rollout and not self.shares_samples

    def gather(self) -> None:
        if self.shares_samples:  # to draw, each rank takes samples of its own: nobody waits
            self.sequence.pause()
        for module in self._shards:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()

    @contextlib.contextmanager
    def by_blocks(self) -> Iterator[None]:
        if not self.layout.is_spread:
            with self.whole():
                yield
            return
        self.optimizer_zero_grad()
        if self.shares_samples:
            self.sequence.pause()
        for module in self._shards:
            module.set_reshard_after_forward(True, recurse=False)
        self.settle()
        try:
            with self.in_step.running():
                yield
        finally:
            self.release()

    @contextlib.contextmanager
    def together(self, precision: str | None = None) -> Iterator[None]:
        with self.whole(precision):
            self.sequence.go_on()
            try:
                with self._together.running():
                    yield
            finally:
                self.sequence.pause()

    @functools.cached_property
    def _together(self) -> Together:
        return Together(self.parts.values(), self.layout, self.device, self.autocast, [self.sequence.group])

    @functools.cached_property
    def in_step(self) -> InStep:
        return InStep(self.parts.values(), self.device, self.layout)

    def release(self) -> None:
        if self.shares_samples:
            self.sequence.go_on()
        for module in self._shards:
            module.set_reshard_after_forward(self.reshards, recurse=False)
        self.settle()

    def settle(self) -> None:
        for module in self._shards:
            module.reshard()

    def begin_micro_batch(self, last: bool) -> None:
        """A gradient that waits for the last backward is held whole, which only that of a LoRA is small enough for."""
        for module in self._shards:
            module.set_requires_gradient_sync(last or self.model_config.lora_rank == 0, recurse=False)
            module.set_is_last_backward(last)

    def sum_of_shards(self, squares: torch.Tensor) -> torch.Tensor:
        if self.layout.is_spread:
            dist.all_reduce(squares, group=self.mesh.get_group(self.mesh.ndim - 1))  # those of one copy
        return squares


# The name that documents give it.
PPODiffusersFSDPEngine = DiffusersFSDPEngine
