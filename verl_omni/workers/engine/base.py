"""The training engine: what a worker may ask of it, and what is the same for all engines."""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from verl.utils.device import get_device_id, get_device_name

import verl_omni.utils.cpu_platform  # noqa: F401  (verl asks for a platform when it is imported)

with warnings.catch_warnings():  # verl announces every engine whose package is not installed
    warnings.simplefilter("ignore")
    from verl.workers.engine.base import BaseEngine, BaseEngineCtx

from verl_omni.config import (
    CheckpointConfig,
    DiffusionActorConfig,
    DiffusionModelConfig,
    EngineConfig,
    OptimizerConfig,
)
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers import columns
from verl_omni.workers.engine import checkpoint_io
from verl_omni.workers.engine.compile.attention import attention_choice
from verl_omni.workers.engine.compile.blocks import compile_blocks
from verl_omni.workers.engine.compile.compile_ahead import compile_ahead
from verl_omni.workers.engine.compile.fused_gelu import fuse_gelu
from verl_omni.workers.engine.lora import FoldedLora, base_name
from verl_omni.workers.engine.metrics import accumulate, and_last, is_maximum
from verl_omni.workers.engine.module import autocast, build_module, fill_module, on_gpu, resolve_dtypes, rounds_alike
from verl_omni.workers.engine.optimizer import build_optimizer
from verl_omni.workers.engine.policies import Policies, policy_at
from verl_omni.workers.engine.replay import Batch, Replay, in_order
from verl_omni.workers.engine.reverse_steps import ReverseSteps
from verl_omni.workers.host_memory import HostMemory, bring, bring_state, local
from verl_omni.workers.layout import Layout

# Under this type of model verl's registry knows the engines that train diffusion models.
MODEL_TYPE = "diffusion_model"
LossFunction = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], Any]


class _Mode(BaseEngineCtx):
    """Loads what is offloaded, and puts it back; the module knows its mode."""

    def __enter__(self):
        super().__enter__()
        self.engine.module.train(self.mode == "train")


class DiffusionEngine(BaseEngine):
    """Holds the transformer and updates it.

    What a forward computes of stored samples is said by its `replay`. How the module lies on the ranks is said by one
    engine, in a folder of its own: `settings`, `lay_out`, `spread`, `gather`, `release`, `settle`, `begin_micro_batch`
    and `sum_of_shards`. A worker asks for what is public here, and for nothing else.
    """

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
        self.micro_batch_size = 16
        self.rows_per_unit = 1
        self.ema_decay = 0.0
        self.changes = 0  # of what a checkpoint holds
        self._replay = replay

    # ---- what one engine says of itself --------------------------------------------------------------

    @classmethod
    def settings(cls, actor: DiffusionActorConfig) -> Any:
        """Where in the actor's configuration this engine's own settings are, beside `actor.engine`."""
        raise NotImplementedError

    @classmethod
    def lay_out(cls, engine_config: Any, world: int) -> Layout:
        """How so many ranks are divided, or one line that says why they cannot be. The driver asks it too."""
        raise NotImplementedError

    def spread(self) -> None:
        """Lay the parts over the ranks, as `layout` says."""
        raise NotImplementedError

    def gather(self) -> None:
        """Every rank holds the whole weights until `release`."""

    def release(self) -> None:
        """Each rank holds its own share again."""

    def settle(self) -> None:
        """Forget gathered weights: what a rank holds is about to be read or written."""

    def begin_micro_batch(self, last: bool) -> None:
        """Gradients are summed over ranks in the last micro-batch's backward only."""

    def sum_of_shards(self, squares: torch.Tensor) -> torch.Tensor:
        """Of all ranks that hold a share of the same weights."""
        return squares

    # ---- construction --------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Build the module, spread it, fill it; then the optimizer and the learning-rate schedule."""
        attention, why = attention_choice(self.common.attention_backend, self.adapter, self.device, self.dtype)
        if self.device.type != "cpu" and dist.get_rank() == 0:
            print(f"Attention: {attention or 'native'} ({why}).", flush=True)
        self.module, self.parts = build_module(self.model_config, self.common.seed, self.model_dtype, attention)
        self.host = HostMemory()
        self.compiled = on_gpu(self.common.use_torch_compile, self.device)
        if self.compiled:
            if on_gpu(self.common.compile_ahead, self.device) and not self.layout.is_spread:
                mixed = self.dtype if self.dtype != torch.float32 else None
                compile_ahead(self.parts.values(), lambda: self.whole_units(self.micro_batch_size), mixed)
            if on_gpu(self.common.fused_gelu, self.device):
                for part in self.parts.values():
                    fuse_gelu(part)
            compile_blocks(self.parts)
        if self.layout.is_spread:  # a single rank has nothing to share: it trains the module as it is
            self.spread()
        fill_module(self.module, self.model_config, self.device, self.model_dtype)
        self.folded_lora = FoldedLora(self.parts.values()) if self._folds_lora() else None
        self.parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.optimizer, self.lr_scheduler = build_optimizer(
            list(self.parameters.values()), self.optimizer_config, self.device
        )
        self.policies = Policies(self.parameters, self.common.param_offload, before_swap=self.settle)
        self.replay = self._replay(self)
        self.to("cpu", model=self.is_param_offload_enabled, optimizer=False, grad=False)

    def _folds_lora(self) -> bool:
        """By default on a GPU whose memory has a quarter left beside the weights and a copy of the adapted ones."""
        if self.model_config.lora_rank == 0 or self.layout.is_spread or self.common.fold_lora is False:
            return False
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
        """Compute in `dtype`, on one rank and on many alike."""
        return autocast(self.device, self.dtype)

    def keep_reference(self, offload: bool = False) -> None:
        """Full fine-tuning: remember the starting weights. With LoRA the reference is the model without adapters."""
        if self.model_config.lora_rank == 0:
            self.policies.keep("reference", offload)

    def keep_ema(self, decay: float) -> None:
        """A moving average of the trained weights, moved after every optimizer step."""
        self.ema_decay = decay
        self.policies.keep("ema")

    def keep_old(self) -> None:
        """The policy that samples, where it follows the trained one at a distance."""
        self.policies.keep("old")

    def move_old(self, decay: float) -> None:
        """old <- decay * old + (1 - decay) * current."""
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
        """Forward passes inside use the policy of that name: current, reference, ema, old."""
        if name == "current":
            yield
        elif name == "reference" and self.model_config.lora_rank > 0:
            with self.disable_adapter():
                yield
        else:
            with self.policies.swapped_in(name):
                yield

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

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Every rank holds the whole model inside, ready to generate; no rank waits for another."""
        if self.folded_lora is not None:
            self.folded_lora.swap_in()
        self.gather()
        try:
            yield
        finally:
            if self.folded_lora is not None:
                self.folded_lora.swap_out()
            self.release()

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
        if optimizer:
            self.host.take_state(self.optimizer) if leaves else bring_state(self.optimizer, self.device)

    # ---- forward, backward, step ---------------------------------------------------------------------

    def remember_policy(self, name: str, version: int, most: int) -> None:
        """The policy of that name, as it is now, under `policy_at(name, version)`, beside the `most` - 1 before it."""
        with self.policy(name):
            self.policies.remember(policy_at(name, version), most)

    def before_update(self, data: Batch, anchors: Mapping[str, str], versions: Sequence[int] = ()) -> Batch:
        """Add to a mini-batch what has to be computed before the first optimizer step."""
        return self.replay.before_update(data, anchors, versions)

    def prepare_model_outputs(self, micro_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the loss sees of the model."""
        return self.replay.model_outputs(micro_batch)

    def forward_step(
        self, micro_batch: dict[str, torch.Tensor], loss_function: LossFunction | None, forward_only: bool
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """One micro-batch: (loss or None, {"model_output", "metrics"})."""
        output = self.prepare_model_outputs(micro_batch)
        if loss_function is None:
            return None, {"model_output": output, "metrics": {}}
        result = loss_function(output, micro_batch)
        metrics = dict(result.metrics)
        if result.add_loss_metric:
            metrics["loss"] = result.loss.detach()
        return result.loss, {"model_output": output if forward_only else {}, "metrics": metrics}

    def forward_backward_batch(
        self,
        data: Batch,
        loss_function: LossFunction | None,
        forward_only: bool = False,
        training_graph: bool = False,
        micro_batch_size: int | None = None,
    ) -> dict[str, Any]:
        """All micro-batches. The gradient is that of the mean over all pairs, however they are split.

        `training_graph` runs a forward as training would, for kernels that round differently without a gradient.
        """
        self.replay.check(data)
        data = {name: v if columns.of(name).host else v.to(self.device) for name, v in data.items()}
        outputs, metrics = [], {}
        for part, last in and_last(self.replay.split(data, micro_batch_size or self.micro_batch_size)):
            self.begin_micro_batch(last)
            with torch.set_grad_enabled(training_graph or not forward_only), self.autocast():
                loss, out = self.forward_step(self.replay.take(data, part), loss_function, forward_only)
            if not forward_only:
                (loss * part.share).backward()
            elif part.counts:
                outputs.append((part, {k: v.detach() for k, v in out["model_output"].items()}))
            accumulate(metrics, out["metrics"], part.share)
        return {"model_output": in_order(outputs), "metrics": self.reduce_metrics(metrics)}

    def whole_units(self, rows: int) -> int:
        """As many of `rows` rows as make whole units, such as pairs."""
        return max(1, rows // self.rows_per_unit) * self.rows_per_unit

    def train_batch(
        self,
        data: Batch,
        loss_function: LossFunction,
        before_step: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, Any]:
        """One optimizer step. `before_step` sees the metrics, the same on every rank, and may raise."""
        self.optimizer_zero_grad()
        output = self.forward_backward_batch(data, loss_function)
        if before_step is not None:
            before_step(output["metrics"])
        self.drop_idle_gradients(data)
        output["metrics"]["grad_norm"] = self.optimizer_step()
        output["metrics"]["lr"] = self.lr_scheduler_step()
        return output

    def drop_idle_gradients(self, data: Batch) -> None:
        """A part that no rank had a row for that counts has no gradient, and the optimizer leaves it alone.

        It may have run all the same: for fillers, or because another rank did. Its gradient is then 0, with which Adam
        would still move it, by its momentum and by weight decay.
        """
        if len(self.parts) == 1:
            return
        timesteps = self.replay.timesteps(data).cpu()
        if "share" in data:
            timesteps = timesteps[data["share"].cpu() > 0]
        used = self.adapter.parts_at(self.module, timesteps.flatten()) if len(timesteps) else ()
        seen = torch.tensor([int(name in used) for name in self.parts], device=self.device)
        if self.layout.is_spread:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        for part, anywhere in zip(self.parts.values(), seen.tolist(), strict=True):
            if not anywhere:
                part.zero_grad(set_to_none=True)

    def infer_batch(
        self,
        data: Batch,
        loss_function: LossFunction | None = None,
        training_graph: bool = False,
        micro_batch_size: int | None = None,
    ) -> dict[str, Any]:
        return self.forward_backward_batch(data, loss_function, True, training_graph, micro_batch_size)

    @property
    def rounds_like_rollout(self) -> bool:
        """Whether training reproduces the rollout's log-probabilities to 1e-6."""
        return rounds_alike(self.dtype, self.compiled, folded=self.folded_lora is not None)

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Clip, step, move the average; the gradient's norm before clipping."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        squares = torch.stack([local(g).float().square().sum() for g in grads]).sum()
        norm = math.sqrt(self.sum_of_shards(squares).item())
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient's norm is {norm}: the update would destroy the weights. A lower learning rate "
                "(actor_rollout_ref.actor.optim.lr) or noise_level usually helps"
            )
        limit = self.optimizer_config.clip_grad
        if limit and norm > limit:
            for grad in grads:
                local(grad).mul_(limit / (norm + 1e-6))
        self.changes += 1
        self.optimizer.step()
        if self.ema_decay:
            self.policies.blend("ema", self.ema_decay)
        return norm

    def lr_scheduler_step(self) -> float:
        """The learning rate of the step just taken; the next one's is set."""
        lr = self.lr_scheduler.get_last_lr()[0]
        self.lr_scheduler.step()
        return lr

    def reduce_metrics(self, metrics: dict[str, torch.Tensor]) -> dict[str, float]:
        """Mean over ranks; names with `max` are maxima."""
        if not metrics:
            return {}
        names = sorted(metrics)
        values = torch.stack([torch.as_tensor(metrics[n], dtype=torch.float64).cpu() for n in names]).to(self.device)
        gathered = [torch.empty_like(values) for _ in range(self.layout.world)]
        dist.all_gather(gathered, values)
        stacked = torch.stack(gathered)
        return {n: (stacked[:, i].max() if is_maximum(n) else stacked[:, i].mean()).item() for i, n in enumerate(names)}

    def get_per_tensor_param(
        self, base_sync_done: bool = True, **kwargs
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """(weights by the module's own names, each gathered from all ranks; with LoRA, what peft knows of the adapter).

        These are the trained weights: of a LoRA the adapter, unless the frozen weights below it have to go first.
        """
        self.settle()
        named, peft_config = self.parameters, None
        if self.model_config.lora_rank:
            peft_config = next(iter(self.parts.values())).peft_config["default"].to_dict()
        if peft_config is not None and not base_sync_done:
            named = {base_name(n): p for n, p in self.module.named_parameters() if n not in self.parameters}
        whole = ((n, p.full_tensor() if hasattr(p, "full_tensor") else p) for n, p in named.items())
        return ((name, tensor.detach()) for name, tensor in whole), peft_config

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
        self.settle()
        checkpoint_io.save(self, local_path)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False, **kwargs
    ) -> None:
        self.settle()
        checkpoint_io.load(self, local_path)

    def checkpoint_bytes(self) -> int:
        """The size of what `save_checkpoint` would write now."""
        return checkpoint_io.needed_bytes(self)
