"""Forward, backward and the optimizer's step: the same for all engines."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from verl_omni.workers import columns
from verl_omni.workers.engine.group_sums import group_sums
from verl_omni.workers.engine.metrics import accumulate, and_last, is_maximum
from verl_omni.workers.engine.protocol import LossFunction, TrainingEngine
from verl_omni.workers.engine.replay import Batch, Replay, in_order
from verl_omni.workers.engine.step_in_pieces import step_in_pieces
from verl_omni.workers.host_memory import local, on_host


class Passes(TrainingEngine):
    """What a forward computes of stored samples is said by `replay`."""

    replay: Replay
    #: whether what passes give is kept in CPU memory
    outputs_on_host: bool = False

    def before_update(self, data: Batch, anchors: Mapping[str, str], versions: Sequence[int] = ()) -> Batch:
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
        data = columns.near(data, self.device)
        outputs, metrics = [], {}
        for part, last in and_last(self.replay.split(data, micro_batch_size or self.micro_batch_size)):
            self.begin_micro_batch(last)
            with torch.set_grad_enabled(training_graph or not forward_only), self.autocast():
                loss, out = self.forward_step(self.replay.take(data, part), loss_function, forward_only)
            if not forward_only:
                (loss * part.share).backward()
            elif part.counts:
                outputs.append((part, self.put_away(out["model_output"])))
            accumulate(metrics, out["metrics"], part.share)
            del loss, out  # or this graph is still held while the next is built
        return {"model_output": in_order(outputs), "metrics": self.reduce_metrics(metrics)}

    def put_away(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a forward gave, until all of the batch has been through."""
        outputs = {name: value.detach() for name, value in outputs.items()}
        return on_host(outputs) if self.outputs_on_host else outputs

    def whole_units(self, rows: int) -> int:
        """As many of `rows` rows as make whole units, such as pairs."""
        return max(1, rows // self.rows_per_unit) * self.rows_per_unit

    def train_batch(
        self,
        data: Batch,
        loss_function: LossFunction,
        before_step: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, Any]:
        self.optimizer_zero_grad()
        output = self.forward_backward_batch(self.with_sums(data, loss_function), loss_function)
        if before_step is not None:
            before_step(output["metrics"])
        self.drop_idle_gradients(data)
        output["metrics"]["grad_norm"] = self.optimizer_step()
        output["metrics"]["lr"] = self.lr_scheduler_step()
        return output

    def with_sums(self, data: Batch, loss_function: LossFunction) -> Batch:
        """With what a loss has to know of whole groups under the weights of this moment."""
        if not getattr(loss_function, "by_group", False):
            return data
        return data | {"group_sums": group_sums(self, data, loss_function)}

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

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def _not_finite(self) -> list[str]:
        """Parameters with NaN or infinity in their gradients, on any rank. A backward hands both on to all before."""
        grads = [parameter.grad for parameter in self.parameters.values()]
        bad = torch.tensor([int(g is not None and not local(g).isfinite().all()) for g in grads], device=self.device)
        if self.layout.is_spread:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return [name for name, found in zip(self.parameters, bad.tolist(), strict=True) if found]

    @torch.no_grad()  # or each look at a shard is an operation of autograd's
    def optimizer_step(self) -> float:
        """Clip, step, move the average; the gradient's norm before clipping."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        squares = torch.stack([local(g).float().square().sum() for g in grads]).sum()
        norm = math.sqrt(self.sum_of_shards(squares).item())
        if not math.isfinite(norm):
            where, kernel = "", ""
            if bad := self._not_finite():
                where = f", in {len(bad)} of {len(self.parameters)} parameters, the last of them {bad[-1]}"
                kernel = "; on a GPU so may another attention kernel (actor_rollout_ref.actor.engine.attention_backend)"
            raise FloatingPointError(
                f"the gradient's norm is {norm}{where}: the update would destroy the weights. A lower learning rate "
                f"(actor_rollout_ref.actor.optim.lr) or noise_level usually helps{kernel}"
            )
        limit = self.optimizer_config.clip_grad
        if limit and norm > limit:
            for grad in grads:
                local(grad).mul_(limit / (norm + 1e-6))
        self.changes += 1
        if self.is_optimizer_offload_enabled:
            step_in_pieces(self.optimizer, self.host, self.device)
        else:
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
