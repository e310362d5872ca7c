"""When samples are drawn: in turn with learning, or one step ahead of it."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from verl.protocol import DataProto

from verl_omni.trainer.diffusion.experience import Experience
from verl_omni.trainer.diffusion.prompts import PromptStream

if TYPE_CHECKING:
    from verl_omni.trainer.diffusion.base_trainer import BaseRayDiffusionTrainer


class Pace:
    """Draw, learn, draw, learn: each experience is of the weights that learn from it."""

    overlaps = False

    def __init__(self, trainer: "BaseRayDiffusionTrainer"):
        self.trainer = trainer
        self.prompts = PromptStream(trainer.train_loader)

    def next(self) -> Experience:
        """The experience of the next training step."""
        return self.trainer.sample(self.prompts.take())

    def settle(self) -> None:
        """Before others ask the engines: what is being drawn has been drawn."""

    def metrics(self, batch: DataProto) -> dict[str, float]:
        """Of the experience that has just been learned from: where others draw, how old it was."""
        if self.trainer.config.actor_rollout_ref.hybrid_engine:
            return {}
        return staleness(self.trainer.global_step, batch.non_tensor_batch["version"]) | self.trainer.rollouts.metrics()

    def data_state(self) -> dict[str, Any]:
        """Where in the data a run would go on that has learned from all experiences up to now, and from no other."""
        return self.prompts.state_dict()

    def close(self) -> None:
        """Nothing more is going to be learned: begin to draw nothing more."""


class OneStepOff(Pace):
    """While step k is learned, the samples of step k + 1 are drawn, with the weights from before step k."""

    def __init__(self, trainer: "BaseRayDiffusionTrainer"):
        super().__init__(trainer)
        self.overlaps = trainer.config.trainer.max_staleness != 0
        self.ahead: _Ahead | None = None
        self._before: dict[str, Any] = {}

    def next(self) -> Experience:
        experience = (self.ahead or self._start(self.trainer.global_step)).experience
        following = self.trainer.global_step + 1
        self.ahead = self._start(following) if self.overlaps and following < self.trainer.total_steps else None
        return experience

    def _start(self, step: int) -> "_Ahead":
        self._before = self.prompts.state_dict()
        return _Ahead(self.trainer.start_sampling(self.prompts.take(), step))

    def settle(self) -> None:
        if self.ahead is not None:
            _ = self.ahead.experience

    def data_state(self) -> dict[str, Any]:
        return super().data_state() if self.ahead is None else self._before


class _Ahead:
    """An experience that is being drawn."""

    def __init__(self, wait: Callable[[], Experience]):
        self._wait = wait

    @cached_property
    def experience(self) -> Experience:
        return self._wait()


def staleness(step: int, versions: Sequence[int]) -> dict[str, float]:
    """How many training steps lie between the weights that drew the samples and those that learn from them."""
    behind = [step - version for version in versions]
    return {"staleness/mean": sum(behind) / len(behind), "staleness/max": float(max(behind))}
