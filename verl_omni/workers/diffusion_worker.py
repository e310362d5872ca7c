"""The process that holds the model: trains it, and (with the embedded engine) generates with it."""

import contextlib
import functools
import gc
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    collect_all_to_all,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils.device import get_torch_device

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.algorithms.forward_process import TEACHER, anchor_policies, follows_old_policy
from verl_omni.algorithms.registry import get_algorithm
from verl_omni.config import (
    DiffusionActorConfig,
    DiffusionModelConfig,
    DiffusionRefConfig,
    DiffusionRolloutConfig,
)
from verl_omni.config.actor import AUTO
from verl_omni.perf.flops import FlopMeter, peak_flops
from verl_omni.perf.memory import names_memory_knobs
from verl_omni.utils.external_lib import import_external_lib
from verl_omni.workers import columns
from verl_omni.workers.engine.compile.clock import clock
from verl_omni.workers.engine.metrics import is_maximum
from verl_omni.workers.engine.micro_batch import find_micro_batch
from verl_omni.workers.engine.module import quiet_loading
from verl_omni.workers.engine.protocol import TrainingEngine
from verl_omni.workers.engine.registry import REPLAYS, engine_class
from verl_omni.workers.engine.teachers import keep_teachers, teacher_folders, teacher_name
from verl_omni.workers.first_ratio import COMPARED, check_first_ratio
from verl_omni.workers.layout import ROWS
from verl_omni.workers.losses import build_loss_function
from verl_omni.workers.old_log_probs import OldLogProbs, choose_old_log_probs
from verl_omni.workers.process_group import join_process_group
from verl_omni.workers.rollout import engine_class as rollout_class
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.trajectories import (
    COLUMN,
    TrajectoryStore,
    in_two_parts,
    requests_a_sample,
    unfolded,
)
from verl_omni.workers.rollout.under_way import UnderWay
from verl_omni.workers.transfer.weights import Name, SentWeights, StoredWeights, store_in_buckets

if TYPE_CHECKING:
    from verl_omni.workers.transfer.channel import Channel

# Each rank gets the rows that the layout gives it, and who speaks for others answers for them.
BY_ROWS = make_nd_compute_dataproto_dispatch_fn(ROWS)
GIB = 2**30
BY_ROWS_TO_METRICS = BY_ROWS | {"collect_fn": collect_all_to_all}


class DiffusionWorker(Worker):
    def __init__(self, config: DictConfig, role: str = "actor_rollout_ref"):
        super().__init__()
        self.config = config
        quiet_loading()
        import_external_lib(config.actor_rollout_ref.model.external_lib)
        self.actor_config: DiffusionActorConfig = OmegaConf.to_object(config.actor_rollout_ref.actor)
        self.model_config: DiffusionModelConfig = OmegaConf.to_object(config.actor_rollout_ref.model)
        self.rollout_config: DiffusionRolloutConfig = OmegaConf.to_object(config.actor_rollout_ref.rollout)
        self.ref_config: DiffusionRefConfig = OmegaConf.to_object(config.actor_rollout_ref.ref)
        self._group = dist.group.WORLD if join_process_group() else None
        self.rollout = None
        common = self.actor_config.engine
        self.trajectories, self._under_way = TrajectoryStore(common.sample_offload), UnderWay()
        self._settled = False
        self._peaks = (0, 0)  # of memory, before a trial that took more
        self._rollout_scope = contextlib.ExitStack()

    # ---- set-up --------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @names_memory_knobs("loading of the model")
    def init_model(self) -> None:
        self.engine = self._new_engine()
        asked = self.actor_config.ppo_micro_batch_size_per_gpu
        self.engine.finds_micro_batch = asked == AUTO
        self.engine.micro_batch_size = 0 if asked == AUTO else asked
        self.engine.initialize()
        if "fp8" in (self.rollout_config.precision, self.rollout_config.pool.precision):
            self.engine.fp8  # noqa: B018  (what cannot be computed in 8 bits is said now)
        self._say_place()
        self.loss_function = build_loss_function(self.actor_config)
        self.engine.rows_per_unit = self.loss_function.loss_fn.rows_per_unit
        self.old_log_probs: OldLogProbs | None = None
        self.anchors = anchor_policies(self.model_config.algorithm, self.actor_config)
        self.peak_flops = peak_flops()
        self.flop_meter = FlopMeter(self.engine.parts.values()) if self.peak_flops else None
        self.flops: dict[str, float | None] = {}
        if self.loss_function.needs_reference:
            own = {} if self.ref_config.path is None else {"path": self.ref_config.path}
            self.engine.keep_reference(self.ref_config.param_offload, **own)
        if self.actor_config.teacher.ranks:  # others ask them, and hand on what they say
            self.anchors = {name: policy for name, policy in self.anchors.items() if policy != TEACHER}
        elif self.loss_function.needs_teacher:
            keep_teachers(self.engine, self.actor_config.teacher.path)
        if follows_old_policy(self.model_config.algorithm, self.actor_config):
            self.engine.keep_old()
        if self.actor_config.ema_decay:
            self.engine.keep_ema(self.actor_config.ema_decay)
        if self.config.algorithm.sample_source == "online" and self.config.actor_rollout_ref.hybrid_engine:
            self.rollout = rollout_class(self.rollout_config.name).beside(
                self.engine, self.rollout_config, self.model_config
            )

    def _new_engine(self) -> TrainingEngine:
        """As the settings have it, and not built."""
        engine = engine_class(self.actor_config.strategy)
        return engine(
            model_config=self.model_config,
            engine_config=engine.settings(self.actor_config),
            optimizer_config=self.actor_config.optim,
            checkpoint_config=self.actor_config.checkpoint,
            replay=REPLAYS[self.config.algorithm.trainer_type],
            common=self.actor_config.engine,
        )

    def _say_place(self) -> None:
        """Which rows are this rank's, to verl's dispatch."""
        layout, rank = self.engine.layout, dist.get_rank()
        self._register_dispatch_collect_info(ROWS, layout.data_rank(rank), layout.speaks(rank))

    # ---- rollout -------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_rollout(self, policy: str = "current", version: int = 0, precision: str | None = None) -> None:
        """Have the weights of one policy ready for `generate` on every rank; `version` names them."""
        self.rollout.begin()
        scope, asked = contextlib.ExitStack(), {} if precision is None else {"precision": precision}
        scope.enter_context(self.rollout.with_policy(self.engine, policy, version, **asked))
        self._rollout_scope = scope

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_rollout(self) -> None:
        self.rollout.drain()  # a request that nobody waits for any more may still be drawn
        self._rollout_scope.close()
        if not self.rollout.has_a_copy:
            self._count_flops("gen")

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        negative_prompt_ids: list[int] | None = None,
        priority: int = 0,
    ) -> RolloutOutput:
        """Tokens in, image out. What training needs of it stays here, under the name in `sampling_params["place"]`."""
        drawing = self.rollout.generate(
            prompt_ids, sampling_params, request_id, image_data, video_data, negative_prompt_ids, priority
        )
        output = await self._under_way.answer(request_id, drawing, lambda: self.rollout.give_back(sampling_params))
        place = sampling_params.get("place")
        return output.cpu() if place is None else self.trajectories.keep(place["key"], output)

    @ray.method(num_returns=2)
    async def generate_to_ship(self, **request: Any) -> tuple[RolloutOutput, dict[str, torch.Tensor]]:
        """For another rank to train on: (the answer, what training needs of it)."""
        drawing, params = self.rollout.generate(**request), request["sampling_params"]
        return in_two_parts(
            await self._under_way.answer(request["request_id"], drawing, lambda: self.rollout.give_back(params))
        )

    async def abort(self, request_id: str) -> bool:
        """Its `generate` raises `RequestAborted` now. Whether there was such a request."""
        return self._under_way.abort(request_id)

    async def compiling_seconds(self) -> float:
        """That this process has waited for a compiler since it began."""
        return clock.seconds()

    async def withdraw(self, position: tuple) -> None:
        """A sample of the burst will ask for nothing."""
        self.rollout.batcher.withdraw(position)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def release(self, experiences: tuple[str, ...]) -> None:
        """Forget the trajectories of what has been learned from."""
        self.trajectories.release(*experiences)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish_weights(self, policy: str, version: int, base_sync_done: bool = True) -> StoredWeights:
        """The trained weights of a policy in Ray's object store. All ranks take part, the first has the references.

        With LoRA that is the adapter; the frozen weights below it with `base_sync_done` false.
        """
        self.remember(policy, version)
        with self.engine.eval_mode(), self.engine.policy(policy):
            weights, peft_config = self.engine.get_per_tensor_param(base_sync_done, dtype=self._sent_dtype)
            return store_in_buckets(
                weights, dist.get_rank() == 0, peft_config=peft_config, base_sync_done=base_sync_done
            )

    @property
    def _sent_dtype(self) -> torch.dtype | None:
        """That in which servers hold the weights, where it is another than training's."""
        return rollout_class(self.rollout_config.name).receives(self.model_config, self.engine.dtype)

    def remember(self, policy: str, version: int) -> None:
        """Servers are going to draw with it. A loss that compares with whoever drew may come to it steps later."""
        behind = self.config.trainer.max_staleness
        if behind and policy == self.anchors.get("old_velocity"):
            self.engine.remember_policy(policy, version, most=behind + 1)

    async def execute_checkpoint_engine(self, method: str, **kwargs: Any) -> Any:
        return getattr(self.channel.engine, method)(**kwargs)

    async def send_weights(self, name: Name, base_sync_done: bool = True) -> SentWeights:
        """The same to all rollout servers, which receive them now. All ranks take part."""
        self.remember(*name)
        with self.engine.eval_mode(), self.engine.policy(name[0]):
            weights, peft_config = self.engine.get_per_tensor_param(base_sync_done, dtype=self._sent_dtype)
            return await self.channel.send(weights, name, peft_config=peft_config, base_sync_done=base_sync_done)

    @functools.cached_property
    def channel(self) -> "Channel":
        is_master = dist.get_rank() == 0  # before the import: verl asks the driver for all attributes of this class
        from verl_omni.workers.transfer.channel import Channel

        return Channel(self.rollout_config.checkpoint_engine, is_master)

    # ---- training ------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def follow_reward(self, make: Callable[[str], Callable[[torch.Tensor, list[Any]], torch.Tensor]]) -> None:
        """For losses that ask for `predicted_reward`. `make` gives, for a device, rewards with a gradient: of pixels,
        and of what is told of each image."""
        self.engine.replay.reward_of = self.rollout.with_reward(make(str(self.engine.device)))
        self.engine.replay.chained = self.loss_function.loss_fn.chained_steps(self.actor_config)

    @register(dispatch_mode=BY_ROWS)
    @names_memory_knobs("old log-probabilities")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Log-probabilities of the stored steps under the policy as it is now. Means too, if the loss compares with
        them and not with the rollout's."""
        self._find_micro_batch(data)
        batch = self._batch(data)
        batch.pop("uncond_velocity", None)  # the rollout's: what is asked for is how training sees its steps
        # The update compares with these: in the kernels of its own graph, where others would round differently.
        with self.engine.eval_mode():
            output = self.engine.infer_batch(batch, training_graph=not self.engine.rounds_like_rollout)
        output = output["model_output"]
        self._count_flops("old_log_prob")
        found = {"old_log_probs": output["log_probs"]}
        compared = not self.config.algorithm.rollout_correction.bypass_mode
        asked = "old_prev_sample_mean" in self.loss_function.loss_fn.data_keys(self.actor_config)
        if compared and (asked or self.ref_config.precision is not None):
            found["old_prev_sample_mean"] = output["prev_sample_mean"]
        return self._per_step(data, **found)

    @register(dispatch_mode=BY_ROWS)
    @names_memory_knobs("reference pass")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Means of the stored steps under the reference. In 8 bits, how far they are from the means that drew, which
        had 8 bits too: what rounding does to both is in neither."""
        self._find_micro_batch(data)
        batch, size = self._batch(data), self.ref_config.log_prob_micro_batch_size_per_gpu
        batch.pop("uncond_velocity", None)  # the policy's, not the reference's
        precision = self.ref_config.precision
        with self.engine.eval_mode(), self.engine.policy("reference"), self.engine.in_precision(precision):
            means = self.engine.infer_batch(batch, micro_batch_size=size)["model_output"]["prev_sample_mean"]
        self._count_flops("ref")
        if precision is None:
            return self._per_step(data, ref_prev_sample_mean=means)
        drew = batch["old_prev_sample_mean"]
        steps = data.batch["all_timesteps"].shape[1]
        away = [means[i] - drew[i // steps][i % steps].to(means[i].device) for i in range(len(means))]
        return self._per_step(data, ref_shift=columns.as_they_are(away))

    @register(dispatch_mode=BY_ROWS)
    @names_memory_knobs("teacher's pass")
    def compute_teacher_means(self, data: DataProto) -> DataProto:
        """Means of the stored steps under the teacher of each row."""
        self._find_micro_batch(data)
        means = self._teacher_means(data)
        self._count_flops("teacher")
        return self._per_step(data, teacher_prev_sample_mean=means)

    def _teacher_means(self, data: DataProto) -> torch.Tensor | columns.Ragged:
        """Every rank asks all teachers: none waits for it."""
        batch, means = self._batch(data), None
        batch.pop("uncond_velocity", None)  # the policy's, not the teacher's
        size, steps = self.ref_config.log_prob_micro_batch_size_per_gpu, data.batch["all_timesteps"].shape[1]
        own = batch.pop("teacher").repeat_interleave(steps // requests_a_sample(data))  # it has one for each request
        for number in range(len(teacher_folders(self.actor_config.teacher.path))):
            with self.engine.eval_mode(), self.engine.policy(teacher_name(number)):
                found = self.engine.infer_batch(batch, micro_batch_size=size)["model_output"]["prev_sample_mean"]
            means = found if means is None else _where(own == number, found, means)
        return means

    @register(dispatch_mode=BY_ROWS)
    def lend(self, data: DataProto) -> DataProto:
        """Where another process finds what a policy's forwards of these samples need."""
        return DataProto(non_tensor_batch={COLUMN: self.trajectories.lent(data, columns.is_replayed)})

    def _find_micro_batch(self, data: DataProto) -> None:
        """Where the user leaves it to a trial: before the first pass over samples, whichever it is."""
        if self.engine.micro_batch_size:
            return
        batch = self.engine.before_update(self._batch(data), {})
        mini_batches = self.config.data.train_batch_size // self.actor_config.ppo_mini_batch_size
        rows = data.meta_info.get("mini_batch_rows") or [1] * mini_batches  # fewer where samples are missing, or uneven
        most = math.ceil(len(self.engine.replay.pairs(batch)[0]) * max(rows) / sum(rows))
        self._peaks = self._peak_memory()
        with self.engine.train_mode():
            self.engine.micro_batch_size, why = find_micro_batch(self.engine, batch, most, self._bytes_beside())
        self._say_micro_batch(why)
        get_torch_device().reset_peak_memory_stats()
        if self.flop_meter is not None:
            self.flop_meter.take()  # what was tried is no part of a step

    def _bytes_beside(self) -> float:
        """Of the device's memory, that another model will take while this one is trained, and has not yet."""
        return 0.0

    def _say_micro_batch(self, why: str) -> None:
        if dist.get_rank() == 0:
            print(f"Micro-batch: {self.engine.micro_batch_size} ({why}).", file=sys.stderr, flush=True)  # to run.log

    @staticmethod
    def _peak_memory() -> tuple[int, int]:
        device = get_torch_device()
        return device.max_memory_allocated(), device.max_memory_reserved()

    def _batch(self, data: DataProto) -> dict[str, torch.Tensor]:
        """What the driver sent, and the trajectories that it refers to: a row for each request that is trained on."""
        return unfolded(tensors(data), requests_a_sample(data)) | self.trajectories.batch(data)

    def _per_step(self, data: DataProto, **outputs: torch.Tensor) -> DataProto:
        """Results (pairs, ...) as (samples, steps, ...): kept here with their samples, or sent to the driver."""
        steps = data.batch["all_timesteps"].shape
        outputs = {k: v.unflatten(0, steps) for k, v in outputs.items()}
        if self.trajectories.holds(data):
            small = {k: outputs.pop(k).cpu() for k in list(outputs) if not columns.of(k).large}
            self.trajectories.add(data, outputs)
            return DataProto.from_dict({"sample_id": data.batch["sample_id"], **small})
        return DataProto.from_dict({k: v.cpu() for k, v in outputs.items()})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset_peak_memory(self) -> None:
        get_torch_device().reset_peak_memory_stats()
        self._peaks = (0, 0)

    @register(dispatch_mode=BY_ROWS_TO_METRICS)
    @names_memory_knobs("update")
    def update_actor(self, data: DataProto) -> dict[str, float]:
        """All optimizer steps of one rollout; `num_mini_batches` and `epochs` are in the batch's meta_info."""
        if "told" in data.meta_info:
            self.engine.replay.told = data.meta_info["told"]
        self._find_micro_batch(data)
        epochs, stale = data.meta_info["epochs"], data.meta_info.get("stale", False)
        old = self._choose_old_log_probs(stale)
        versions = data.meta_info.get("versions", ())
        minis = [self.engine.before_update(mini, self.anchors, versions) for mini in self._mini_batches(data)]
        history = []
        with self.engine.train_mode():
            own = old is not None and old.source == "train"
            if own:
                self._recompute_old(minis if epochs > 1 else minis[1:])
            elif old is not None and old.source == "recompute" and "rollout_log_probs" not in minis[0]:
                for mini in minis:  # nobody has done it before
                    mini["rollout_log_probs"] = mini["old_log_probs"]
                self._recompute_old(minis)
            for epoch in range(epochs):
                for i, mini in enumerate(minis):
                    first = epoch == 0 and i == 0
                    self.loss_function.on_policy, self.loss_function.compares_rollout = first and own, first
                    self.loss_function.measures_rollout = first and self.rollout_config.precision is not None
                    self.loss_function.unmoved = first and not stale and self.anchors.get("old_velocity") == "current"
                    if stale or not first or (old is not None and old.source == "recompute"):
                        mini.pop("uncond_velocity", None)  # the weights have moved, or old ones are without it
                    check = self._check_first_ratio if first and not stale else None
                    history.append(self.train_mini(mini, check))
        apart = {name: history[0].pop(k) for k, name in COMPARED.items() if k in history[0]}
        metrics = {f"actor/{k}": reduce_history(k, [h[k] for h in history]) for k in history[0]}
        metrics |= apart
        if "ratio_max_dev" in history[0]:  # before the first update rollout and training agree
            metrics["actor/first_ratio_max_dev"] = history[0]["ratio_max_dev"]
        if old is not None:
            metrics[f"actor/old_log_probs_from_{old.source}"] = 1.0
        self._count_flops("update_actor")
        if self.rollout is not None:
            metrics |= {f"timing_s/gen_{phase}": s for phase, s in self.rollout.take_seconds().items()}
        if clock.counts:
            metrics["perf/compiling_s"] = clock.take()
        flops, self.flops = self.flops, {}
        if flops and None not in flops.values():
            metrics |= {f"flops/{stage}": value for stage, value in flops.items()}
            metrics["flops/peak"] = self.peak_flops
        allocated, reserved = map(max, self._peak_memory(), self._peaks)
        metrics["perf/max_memory_allocated_gb"] = allocated / GIB
        metrics["perf/max_memory_reserved_gb"] = reserved / GIB
        if not self._settled:
            freeze_heap()
            self._settled = True
        return metrics

    def train_mini(
        self, mini: dict[str, torch.Tensor], check: Callable[[dict[str, float]], None] | None
    ) -> dict[str, float]:
        """One optimizer step. `check` sees the metrics before the first one after a rollout, and may raise."""
        return self.engine.train_batch(mini, self.loss_function, check)["metrics"]

    def _mini_batches(self, data: DataProto) -> list[dict[str, torch.Tensor]]:
        """Equal ones, or of the sizes in `mini_batch_rows`."""
        count = data.meta_info["num_mini_batches"]
        rows = data.meta_info.get("mini_batch_rows") or [len(data) // count] * count
        sizes = [size * requests_a_sample(data) for size in rows]
        columns = {k: v.split(sizes) for k, v in self._batch(data).items()}
        return [{k: v[i] for k, v in columns.items()} for i in range(count)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_old_policy(self, decay: float) -> None:
        """old <- decay * old + (1 - decay) * current."""
        self.engine.move_old(decay)

    def _count_flops(self, stage: str) -> None:
        if self.flop_meter is not None:
            shared = stage != "gen" or self.rollout_config.share_samples
            self.flops[stage] = self.flop_meter.take(self.engine.layout.sequence if shared else 1)

    def _choose_old_log_probs(self, stale: bool) -> OldLogProbs | None:
        """What this update compares with, said once and whenever it changes; None for a loss that has no use for it."""
        if "log_probs" not in self.loss_function.loss_fn.required_model_output_keys:
            return None
        chosen = choose_old_log_probs(self.actor_config.old_log_probs, self._same_arithmetic, same_weights=not stale)
        if chosen != self.old_log_probs and dist.get_rank() == 0:
            print(f"Old log-probabilities: {chosen.source} ({chosen.why}).", file=sys.stderr, flush=True)  # to run.log
        self.old_log_probs = chosen
        return chosen

    @property
    def _same_arithmetic(self) -> bool:
        """Whether the rollout's log-probabilities of a step are training's own."""
        same = self.engine.rounds_like_rollout and rollout_class(self.rollout_config.name).same_arithmetic
        return same and self.rollout_config.precision is None

    def _check_first_ratio(self, metrics: dict[str, float]) -> None:
        """Where another policy than the trained one samples, nothing is known about the ratio."""
        if get_algorithm(self.model_config.algorithm).rollout_policy == "current":
            tolerance = self.actor_config.first_ratio_tolerance
            check_first_ratio(metrics, tolerance, other_kernels=not self._same_arithmetic)

    def _recompute_old(self, minis: list[dict[str, torch.Tensor]]) -> None:
        """Before the first update: what later optimizer steps compare with."""
        for mini in minis:
            # Nor the rollout's unconditional half: by then it is computed anew, and the ratio is to begin at 1.
            every_step = {k: v for k, v in mini.items() if k not in ("train_steps", "share", "uncond_velocity")}
            output = self.engine.infer_batch(every_step, training_graph=True)["model_output"]
            steps = mini["all_timesteps"].shape
            mini["old_log_probs"] = output["log_probs"].unflatten(0, steps)
            if "old_prev_sample_mean" in mini:
                mini["old_prev_sample_mean"] = output["prev_sample_mean"].unflatten(0, steps)

    # ---- profile -------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def start_profile(self) -> None:
        from verl_omni.perf.step_profile import StepProfile

        self.profile = StepProfile(self.engine.device)
        self.profile.start()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def stop_profile(self, folder: str) -> None:
        self.profile.stop(Path(folder))

    # ---- checkpoints ---------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, global_step: int = 0) -> None:
        self.engine.save_checkpoint(path, global_step=global_step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool) -> bool:
        """Whether this rank's part is on the disk."""
        return self.engine.checkpoint_written(wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_files(self, path: str) -> dict[str, int]:
        """What is in a checkpoint as this rank's machine sees it, and how many bytes of each."""
        files = (file for file in sorted(Path(path).rglob("*")) if file.is_file())
        return {file.relative_to(path).as_posix(): file.stat().st_size for file in files}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def give_up_checkpoint(self) -> None:
        """Of one that has failed: when this returns, nothing is written here any more."""
        self.engine.give_up_checkpoint()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def changes(self) -> int:
        """How often what `save_checkpoint` would write has been changed here."""
        return self.engine.changes

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_bytes(self) -> int:
        """The size of what `save_checkpoint` would write now."""
        return self.engine.checkpoint_bytes()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        self.engine.load_checkpoint(path)
        if self.engine.finds_micro_batch and self.engine.micro_batch_size:
            self._say_micro_batch("found before the checkpoint")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    def __del__(self):
        group = getattr(self, "_group", None)
        if group is not None and dist.is_initialized() and dist.group.WORLD is group:
            dist.destroy_process_group()


def _where(
    chosen: torch.Tensor, one: torch.Tensor | columns.Ragged, other: torch.Tensor | columns.Ragged
) -> torch.Tensor | columns.Ragged:
    return columns.as_they_are([(one if mine else other)[row] for row, mine in enumerate(chosen.tolist())])


def freeze_heap() -> None:
    """What exists after the first step stays: the garbage collector need not visit it again.

    A full pass takes 0.3 s for the imported modules alone, in the midst of a step, while the device waits.
    """
    gc.collect()
    gc.freeze()


def tensors(data: DataProto) -> dict[str, torch.Tensor]:
    return {k: data.batch[k] for k in data.batch.keys()}


def reduce_history(name: str, values: list[float]) -> float:
    return max(values) if is_maximum(name) else sum(values) / len(values)
