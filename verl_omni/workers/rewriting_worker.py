"""The process that holds the model and, before it, the rewriter."""

import contextlib
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register

from verl_omni.perf.memory import names_memory_knobs
from verl_omni.workers.diffusion_worker import BY_ROWS_TO_METRICS, DiffusionWorker
from verl_omni.workers.engine.optimizer import gradients_to_come, state_to_come
from verl_omni.workers.engine.replay import Batch
from verl_omni.workers.losses import build_loss_function
from verl_omni.workers.old_log_probs import OldLogProbs
from verl_omni.workers.rewriter import ROLLOUT_RATIO, ROLLOUT_RATIO_MEAN, Rewriter
from verl_omni.workers.rollout.base import RolloutOutput


def worker_class(config: DictConfig) -> type[DiffusionWorker]:
    """The worker that this run needs."""
    if config.actor_rollout_ref.rewriter.path is None:
        return DiffusionWorker
    return RewritingWorker if config.actor_rollout_ref.model.path is not None else WritingWorker


class RewritingWorker(DiffusionWorker):
    """Both learn from one advantage, each with an optimizer of its own, or one of them does."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @names_memory_knobs("loading of the model")
    def init_model(self) -> None:
        super().init_model()
        config = OmegaConf.to_object(self.config.actor_rollout_ref.rewriter)
        self.trains_generator = config.train != "rewriter"
        self.rewriter = Rewriter(config, self.actor_config, self.rollout_config, self.model_config)
        self._first_ratio: dict[str, float] = {}
        if self.rewriter.writes_images:  # with the weights that are trained, not with the pipeline's own
            self.rollout.forget_component("vision_language_encoder")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_rollout(self, policy: str = "current", version: int = 0, precision: str | None = None) -> None:
        super().start_rollout(policy, version, precision)
        self._rollout_scope.enter_context(self.rewriter.writing(version))

    async def write(self, prompt: str, sampling_params: dict[str, Any]) -> RolloutOutput:
        """A prompt in, another one out. What training needs of it stays here, with the sample that it is drawn for."""
        params = {name: sampling_params.get(name) for name in ("seed", "temperature", "position", "size")}
        output = await self.rewriter.rollout.write(prompt, **params)
        place = sampling_params.get("place")
        return output.cpu() if place is None else self.trajectories.keep(place["key"], output)

    @register(dispatch_mode=BY_ROWS_TO_METRICS)
    def update_actor(self, data: DataProto) -> dict[str, float]:
        with self.rewriter.engine.train_mode():
            metrics = super().update_actor(data)
        first, self._first_ratio = self._first_ratio, {}
        return metrics | first

    def _find_micro_batch(self, data: DataProto) -> None:
        if self.trains_generator:  # of one that stays as it is nothing goes backward, and there may be no room for that
            super()._find_micro_batch(data)

    def _bytes_beside(self) -> float:
        engine = self.rewriter.engine
        if not self.rewriter.is_trained:
            return 0.0
        state = 0.0 if engine.is_optimizer_offload_enabled else state_to_come(engine.optimizer, engine.optimizer_config)
        return gradients_to_come(engine.optimizer) + state

    def _mini_batches(self, data: DataProto) -> list[Batch]:
        minis = super()._mini_batches(data)
        return [self.rewriter.with_old(mini) for mini in minis] if self.rewriter.is_trained else minis

    def train_mini(self, mini: dict[str, torch.Tensor], check: Any) -> dict[str, float]:
        told = {}
        if self.rewriter.is_trained:
            told = self.rewriter.train(mini, first=check is not None)
            off, _ = told.pop(ROLLOUT_RATIO), told.pop(ROLLOUT_RATIO_MEAN)
            if check is not None:
                self._first_ratio = {"actor/rewriter/first_ratio_max_dev": off}
        drawn = super().train_mini(mini, check) if self.trains_generator else {}
        return drawn | {f"rewriter/{name}": value for name, value in told.items()}

    def _choose_old_log_probs(self, stale: bool) -> OldLogProbs | None:
        return super()._choose_old_log_probs(stale) if self.trains_generator else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, global_step: int = 0) -> None:
        super().save_checkpoint(path, global_step)
        self.rewriter.save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        super().load_checkpoint(path)
        self.rewriter.load(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def changes(self) -> int:
        return super().changes() + self.rewriter.engine.changes

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_bytes(self) -> int:
        return super().checkpoint_bytes() + self.rewriter.engine.checkpoint_bytes()


class WritingWorker(RewritingWorker):
    """Without a generator: what the language model writes is all that there is."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @names_memory_knobs("loading of the model")
    def init_model(self) -> None:
        self.trains_generator, self._first_ratio = False, {}
        self.rewriter = Rewriter(
            OmegaConf.to_object(self.config.actor_rollout_ref.rewriter), self.actor_config, self.rollout_config
        )
        self.engine = self.rewriter.engine
        self.loss_function = build_loss_function(self.actor_config)
        self.anchors, self.flop_meter, self.flops = {}, None, {}
        self._say_place()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_rollout(self, policy: str = "current", version: int = 0, precision: str | None = None) -> None:
        self._rollout_scope = contextlib.ExitStack()
        self._rollout_scope.enter_context(self.rewriter.writing(version))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_rollout(self) -> None:
        self._rollout_scope.close()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, global_step: int = 0) -> None:
        self.rewriter.save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        self.rewriter.load(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def changes(self) -> int:
        return self.engine.changes

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_bytes(self) -> int:
        return self.engine.checkpoint_bytes()
