"""What is the same for all training engines: how they are built, their policies, and where their weights go."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from verl.utils.device import get_device_id, get_device_name

import verl_omni.utils.cpu_platform  # noqa: F401  (verl asks for a platform when it is imported)

with warnings.catch_warnings():  # verl announces every engine whose package is not installed
    warnings.simplefilter("ignore")
    from verl.workers.engine.base import BaseEngineCtx

from verl_omni.config import (
    CheckpointConfig,
    DiffusionModelConfig,
    EngineConfig,
    OptimizerConfig,
)
from verl_omni.perf.memory import names_memory_knobs
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers.engine import checkpoint_io, frozen
from verl_omni.workers.engine.checkpoint_io import Writing
from verl_omni.workers.engine.compile.attention import attention_choice
from verl_omni.workers.engine.compile.attention_trial import best_attention, shape_of
from verl_omni.workers.engine.compile.blocks import compile_blocks
from verl_omni.workers.engine.compile.compile_ahead import compile_ahead
from verl_omni.workers.engine.compile.fused_gelu import fuse_gelu
from verl_omni.workers.engine.fp8 import Fp8Layers
from verl_omni.workers.engine.lora import FoldedLora, GatheredLora, base_name
from verl_omni.workers.engine.module import autocast, build_module, fill_module, on_gpu, resolve_dtypes, rounds_alike
from verl_omni.workers.engine.optimizer import build_optimizer
from verl_omni.workers.engine.passes import Passes
from verl_omni.workers.engine.policies import Policies, policy_at
from verl_omni.workers.engine.protocol import MODEL_TYPE, TrainingEngine
from verl_omni.workers.engine.replay import Replay
from verl_omni.workers.engine.reverse_steps import ReverseSteps
from verl_omni.workers.host_memory import HostMemory, bring, bring_state
from verl_omni.workers.process_group import first_on_its_machine

__all__ = ["MODEL_TYPE", "DiffusionEngine", "TrainingEngine"]


class _Mode(BaseEngineCtx):
    """Loads what is offloaded, and puts it back; the module knows its mode."""

    def __enter__(self):
        super().__enter__()
        self.engine.module.train(self.mode == "train")


class DiffusionEngine(Passes):
    """What all engines share. How the module lies on the ranks is said by one engine, in a folder of its own."""

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        engine_config: Any,
        optimizer_config: OptimizerConfig,
        checkpoint_config: CheckpointConfig,
        replay: type[Replay] = ReverseSteps,
        common: EngineConfig | None = None,
    ):
        self.model_config = model_config
        self.engine_config = engine_config
        self.common = common or EngineConfig.within(engine_config)
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        self.adapter = DiffusionModelBase.get_class(model_config)
        self.device = torch.device(get_device_id() if get_device_name() != "cpu" else "cpu")
        self.dtype, self.model_dtype = resolve_dtypes(self.common, self.device, lora=model_config.lora_rank > 0)
        self.layout = self.lay_out(engine_config, dist.get_world_size())
        self.mode: str | None = None
        self.outputs_on_host = self.common.sample_offload
        self.micro_batch_size = 16
        self.finds_micro_batch = False
        self.rows_per_unit = 1
        self.ema_decay = 0.0
        self.changes = 0  # of what a checkpoint holds
        self.writing: Writing | None = None
        self.models, self.weights_from = {}, None
        self.replay_class = replay

    # ---- construction --------------------------------------------------------------------------------

    def initialize(self) -> None:
        attention, why = self._choose_attention()
        self.attention = attention or "native"
        if self.device.type != "cpu" and dist.get_rank() == 0:
            print(f"Attention: {self.attention} ({why}).", flush=True)
        self.module, self.parts = build_module(self.model_config, self.common.seed, self.model_dtype, attention)
        self.equip()
        self.host = HostMemory()
        self.compiled = on_gpu(self.common.use_torch_compile, self.device) and not self.shares_samples
        if self.compiled:
            budget = self.common.activation_memory_budget
            if self._compiles_ahead():
                mixed = self.dtype if self.dtype != torch.float32 else None
                rows = lambda: self.whole_units(self.micro_batch_size)  # noqa: E731
                compile_ahead(self.parts.values(), rows, mixed, self.as_spread(), budget)
            if on_gpu(self.common.fused_gelu, self.device):
                for part in self.parts.values():
                    fuse_gelu(part)
            compile_blocks(self.parts, budget=budget)
        if self.layout.is_spread:  # a single rank has nothing to share: it trains the module as it is
            self.spread()
        fill_module(self.module, self.model_config, self.device, self.model_dtype, self.weights_from)
        folds = GatheredLora if self.layout.is_spread else FoldedLora
        self.folded_lora = folds(self.parts.values()) if self._folds_lora() else None
        self.parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.optimizer, self.lr_scheduler = build_optimizer(
            list(self.parameters.values()), self.optimizer_config, self.device
        )
        self.policies = Policies(self.parameters, self.common.param_offload, before_swap=self.settle)
        self.replay = self.replay_class(self)
        self.to("cpu", model=self.is_param_offload_enabled, optimizer=False, grad=False)

    def _compiles_ahead(self) -> bool:
        """Of several ranks one on each machine, where asked for: the others find its kernels on disk."""
        if self.finds_micro_batch:  # after the first rollout
            return False
        if self.layout.is_spread:
            return bool(self.common.compile_ahead) and self.compiles_ahead and first_on_its_machine()
        return on_gpu(self.common.compile_ahead, self.device) and first_on_its_machine()

    def as_spread(self) -> Callable[[torch.nn.Module], None] | None:
        """What makes of a block, where there are no other ranks, one that is compiled as among them. None: nothing."""
        return None

    def _choose_attention(self) -> tuple[str | None, str]:
        """(the backend, why). On a GPU, where neither user nor adapter names one, the kernels are tried by one rank."""
        chosen = attention_choice(self.common.attention_backend, self.adapter, self.device, self.dtype)
        named = self.common.attention_backend or self.adapter.attention_backend
        shape = shape_of(self.model_config, self.adapter) if self.device.type == "cuda" and not named else None
        if shape is None or self.dtype == torch.float32:
            return chosen
        found = [best_attention(shape, str(self.device), self.dtype) if dist.get_rank() == 0 else None]
        if self.layout.is_spread:
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def _folds_lora(self) -> bool:
        """By default on a GPU whose memory has a quarter left beside the weights and a copy of the adapted ones."""
        if self.model_config.lora_rank == 0 or self.model_config.base_precision or self.common.fold_lora is False:
            return False  # folded weights are in full
        if self.layout.is_spread:  # into what is gathered, where it is asked for: nobody has timed it on several GPUs
            return bool(self.common.fold_lora) and self.layout.parts > 1
        if self.common.fold_lora is None:
            if self.device.type != "cuda" or self.common.param_offload:
                return False
            weights = sum(p.nbytes for part in self.parts.values() for p in part.parameters())
            memory = torch.cuda.get_device_properties(self.device).total_memory
            return weights + FoldedLora.bytes_needed(self.parts.values()) < 0.75 * memory
        if self.common.param_offload:
            raise ValueError(
                "engine.fold_lora=true keeps two copies of the weights on the device, which param_offload=true is "
                "to keep free: set one of them to false"
            )
        return True

    def autocast(self) -> contextlib.AbstractContextManager:
        return autocast(self.device, self.dtype)

    @property
    def rounds_like_rollout(self) -> bool:
        return rounds_alike(self.dtype, self.compiled, self.folded_lora is not None, self.device)

    def keep_reference(self, offload: bool = False, path: str | None = None) -> None:
        if path is not None:
            frozen.keep(self, "reference", path, "actor_rollout_ref.ref.path", offload)
        elif self.model_config.lora_rank == 0:
            self.policies.keep("reference", offload, fixed=True)

    def keep_ema(self, decay: float) -> None:
        self.ema_decay = decay
        self.policies.keep("ema")

    def keep_old(self) -> None:
        self.policies.keep("old")

    def move_old(self, decay: float) -> None:
        self.changes += 1
        self.policies.blend("old", decay)

    # ---- modes and policies --------------------------------------------------------------------------

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.common.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.common.optimizer_offload

    def train_mode(self, **kwargs) -> _Mode:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs) -> _Mode:
        return _Mode(self, "eval", **kwargs)

    @contextlib.contextmanager
    def policy(self, name: str) -> Iterator[None]:
        if name == "current":
            yield
        elif name in self.models:
            with frozen.standing_in(self, self.models[name]):
                yield
        elif name == "reference" and name not in self.policies:  # of a LoRA
            with self.disable_adapter():
                yield
        else:
            with self.policies.swapped_in(name):
                yield

    def knows(self, name: str) -> bool:
        return name in self.policies or name in self.models

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """LoRA layers pass their input on to the base layer alone.

        peft's own switch also turns `requires_grad` off, which FSDP keeps for the gathered weights if it sees it first.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [m for m in self.module.modules() if isinstance(m, BaseTunerLayer)]
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def remember_policy(self, name: str, version: int, most: int) -> None:
        with self.policy(name):
            self.policies.remember(policy_at(name, version), most)

    @contextlib.contextmanager
    def whole(self, precision: str | None = None) -> Iterator[None]:
        self.optimizer_zero_grad()  # gradients have had their step: a rollout can use the memory
        folds = self.folded_lora is not None
        self.gather()
        if folds:
            self.folded_lora.swap_in(but=self.fp8.linears if precision else ())
        try:
            with self.fp8.held(fold=True) if precision else contextlib.nullcontext():
                yield
        finally:
            if folds:
                self.folded_lora.swap_out()
            self.release()

    @contextlib.contextmanager
    def in_precision(self, precision: str | None) -> Iterator[None]:
        if precision is None:
            yield
            return
        self.gather()
        try:
            with self.fp8.held(fold=False):
                yield
        finally:
            self.release()

    @functools.cached_property
    def fp8(self) -> Fp8Layers:
        modules = self.common.fp8_modules or self.adapter.fp8_modules
        return Fp8Layers(self.parts.values(), modules, self.device, self.dtype)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        super().to(device, model, optimizer, grad)
        leaves = device == "cpu"
        if model:
            self.settle()
            if leaves:
                self.optimizer_zero_grad()  # gradients have had their step: moving them would be for nothing
                self.host.take([self.module])
            else:
                bring([self.module], self.device)
        if optimizer and leaves:  # it comes back piece by piece, when there is a step
            self.host.take_state(self.optimizer, list(self.optimizer.state))
            self.host.settle()

    # ---- weights for a rollout ------------------------------------------------------------------------

    def get_per_tensor_param(
        self, base_sync_done: bool = True, dtype: torch.dtype | None = None, **kwargs
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        self.settle()
        named, peft_config = self.parameters, None
        if self.model_config.lora_rank:
            peft_config = next(iter(self.parts.values())).peft_config["default"].to_dict()
        if peft_config is not None and not base_sync_done:
            named = {base_name(n): p for n, p in self.module.named_parameters() if n not in self.parameters}
        rounded = ((n, p.detach() if dtype is None else p.detach().to(dtype)) for n, p in named.items())
        return ((n, p.full_tensor() if hasattr(p, "full_tensor") else p) for n, p in rounded), peft_config

    # ---- data parallelism and checkpoints ------------------------------------------------------------

    def get_data_parallel_size(self) -> int:
        return self.layout.data

    def get_data_parallel_rank(self) -> int:
        return self.layout.data_rank(dist.get_rank())

    def get_data_parallel_group(self):
        """Those that have rows of their own; all ranks, where each has."""
        return dist.group.WORLD if self.layout.sequence == 1 else self.samples.get_group("data")

    @functools.cached_property
    def samples(self) -> DeviceMesh:
        """Over which each sample is cut, where ranks share them."""
        return self.layout.samples(self.device.type)

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.layout.speaks(dist.get_rank())

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs,
    ) -> None:
        """Write this rank's part of the training state, and the weights in diffusers' format."""
        self.checkpoint_written(wait=True)
        self.settle()
        self.writing = checkpoint_io.save(self, local_path)

    def checkpoint_written(self, wait: bool) -> bool:
        writing, self.writing = self.writing, None
        if writing is None or writing.done(wait):  # an error is raised once: the next checkpoint is another
            return True
        self.writing = writing
        return False

    def give_up_checkpoint(self) -> None:
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.end()

    @names_memory_knobs("loading of the checkpoint")
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False, **kwargs
    ) -> None:
        self.settle()
        checkpoint_io.load(self, local_path)
        if not self.is_optimizer_offload_enabled:  # weights on the host had theirs made there
            bring_state(self.optimizer, list(self.optimizer.state), self.device)

    def checkpoint_bytes(self) -> int:
        return checkpoint_io.needed_bytes(self)
