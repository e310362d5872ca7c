"""A rollout engine that draws one batch after another: requests share forwards, and weights change between batches."""

import asyncio
import contextlib
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch

from verl_omni.config import DiffusionModelConfig, DiffusionRolloutConfig
from verl_omni.pipelines.drawing import Request, Sample
from verl_omni.utils.batcher import Batcher
from verl_omni.workers.engine.lora import check_same_lora
from verl_omni.workers.engine.protocol import TrainingEngine
from verl_omni.workers.rollout.base import RolloutEngine, RolloutOutput


class BatchedRollout(RolloutEngine):
    #: in a training worker: whether it draws with weights of its own, not with the ones that are trained
    has_a_copy: ClassVar[bool] = False
    #: there: whether it can draw with weights that no rank holds whole (`rollout.gather=blocks`)
    draws_by_blocks: ClassVar[bool] = False
    #: there: whether ranks that share samples in training can draw them so (`rollout.share_samples`)
    draws_together: ClassVar[bool] = False

    def __init__(self, config: DiffusionRolloutConfig, model_config: DiffusionModelConfig):
        self.config, self.model_config = config, model_config
        self.batcher = Batcher(self.run_batch, config.max_num_seqs, config.request_batch_max_wait_ms / 1000)
        self._running, self._stopped = False, False
        self._reasons: set[str] = set()  # why no batch begins
        self._changes = 0  # of weights and the like that are under way
        self._base: list[tuple[str, torch.Tensor]] | None = None  # frozen weights that wait for their adapter
        self._state = threading.Condition()

    @classmethod
    @abstractmethod
    def beside(
        cls, training: TrainingEngine, config: DiffusionRolloutConfig, model_config: DiffusionModelConfig
    ) -> "BatchedRollout":
        """The engine in the worker that trains."""

    @abstractmethod
    def with_policy(
        self, training: TrainingEngine, policy: str, version: int
    ) -> contextlib.AbstractContextManager[None]:
        """While it lasts, an engine beside training draws with that policy's weights.

        One that has `precisions` takes `precision` too, where it is asked for one of them.
        """

    def take_seconds(self) -> dict[str, float]:
        """Time spent in each phase since the last call, where the engine counts it."""
        return {}

    @abstractmethod
    def draw_batch(self, requests: list[Request]) -> list[RolloutOutput]:
        """Samples for requests of one kind. Called by one thread, never while weights change."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take all of these weights, or raise: half of an update is no policy. Nothing is drawn meanwhile."""

    @abstractmethod
    def load_base(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Likewise, the frozen weights below a LoRA. Its adapter comes before anything is drawn."""

    def begin(self) -> None:
        """Before a rollout. A guest may be looking on: what belongs to a rollout changes between two batches."""
        with self.between_batches():
            self.forget_rollout()

    def forget_rollout(self) -> None:
        """Whatever the engine keeps of one rollout."""

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
        """One image for one tokenized prompt. Concurrent calls share forwards, up to `max_num_seqs`."""
        if self._stopped:
            raise RuntimeError("the rollout engine has been stopped")
        guest = priority > 0
        request = Request(list(prompt_ids), negative_prompt_ids, image_data, dict(sampling_params), guest)
        try:
            return await self.batcher.submit(request, request.kind, sampling_params.get("position"), guest)
        except asyncio.CancelledError:
            request.gone = True
            raise

    def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        version: int,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = True,
    ) -> None:
        """Between two batches. Frozen weights are taken together with the adapter that comes after them."""
        check_same_lora(peft_config, self.model_config)
        if peft_config is not None and not base_sync_done:
            self._base = [(name, tensor.to("cpu", copy=True)) for name, tensor in weights]
            return
        with self.between_batches():
            if self._base is not None:
                self.load_base(self._base)
                self._base = None
            self.load_weights(weights, version)
            self.version = version

    @contextlib.contextmanager
    def between_batches(self) -> Iterator[None]:
        """Nothing is drawn while this lasts."""
        with self._state:
            self._changes += 1
            self._state.wait_for(lambda: not self._running)
        try:
            yield
        finally:
            with self._state:
                self._changes -= 1
                self._state.notify_all()

    def hold(self, why: str) -> None:
        """Begin no further batch, until `resume` has been called for each reason."""
        with self._state:
            self._reasons.add(why)

    def drain(self) -> None:
        """Wait for the batch that is being drawn."""
        with self._state:
            self._state.wait_for(lambda: not self._running)

    def pause(self) -> None:
        self.hold("pause")
        self.drain()

    def resume(self, why: str = "pause") -> None:
        with self._state:
            self._reasons.discard(why)
            self._state.notify_all()

    def give_back(self, sampling_params: dict[str, Any]) -> None:
        """A request that did not come to be drawn had a place among others, who do not wait for it."""
        position = sampling_params.get("position")
        if position is not None and len(position) > 2:
            self.batcher.withdraw(position)

    def stop(self) -> None:
        self._stopped = True
        self.batcher.close(RuntimeError("the rollout engine has been stopped"))
        for why in list(self._reasons):
            self.resume(why)

    def run_batch(self, requests: list[Request]) -> list[RolloutOutput]:
        """One batch at a time, and none while the engine is paused."""
        with self._state:
            self._state.wait_for(lambda: not self._reasons and not self._changes)
            self._running = True
        try:
            with without_compiling() if requests[0].guest else contextlib.nullcontext():
                return self.draw_batch(requests)
        finally:
            with self._state:
                self._running = False
                self._state.notify_all()


def without_compiling() -> contextlib.AbstractContextManager[None]:
    """A size that a run does not have would be compiled while the run waits, and after that dynamo would take graphs
    for any size, which are slower, for the run's own sizes too."""
    return torch.compiler.set_stance("force_eager")


def answer(sample: Sample, version: int) -> RolloutOutput:
    return RolloutOutput(sample.response, sample.trajectory, sample.conditions, version=version)
