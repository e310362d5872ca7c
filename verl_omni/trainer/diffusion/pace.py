"""When samples are drawn: in turn with learning, or one step ahead of it."""

from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from verl.protocol import DataProto

from verl_omni.data.prompt_loader import PromptDataLoader
from verl_omni.report.timeline import Timeline
from verl_omni.trainer.callbacks import Run
from verl_omni.trainer.diffusion.experience import Experience
from verl_omni.trainer.diffusion.filter_groups import GroupFilter
from verl_omni.trainer.diffusion.prompts import PromptStream
from verl_omni.trainer.diffusion.rollouts import Weights


class DrawnGroup(NamedTuple):
    """A group that is being drawn: the name of its trajectories, what was asked, and what waits for (samples, what
    waits for their scores)."""

    name: str
    rows: DataProto
    drawing: Awaitable[tuple[DataProto, Awaitable[DataProto]]]


class Draws(Protocol):
    """All that a pace asks of a trainer: to have prompts drawn."""

    num_servers: int
    group_filter: GroupFilter | None
    timeline: Timeline

    def start_sampling(self, prompts: DataProto, step: int) -> Callable[[], Experience]:
        """Begin to draw samples for the training step after `step` others; what comes back waits for them."""

    def publish(self) -> Weights:
        """The weights as they are now, for servers to draw with."""

    async def draw_groups(
        self,
        server: int,
        prompts: DataProto,
        step: int,
        groups: Sequence[int],
        newest: Callable[[], Weights],
        learns: bool,
    ) -> tuple[int, list[DrawnGroup]]:
        """One server begins with these groups of a step: (the version of the weights that draw, the groups)."""

    def scored_rows(self, batch: DataProto, result: DataProto) -> DataProto:
        """The scores of requests beside what was asked."""

    def experience(
        self, names: tuple[str, ...], version: int, step: int, output: DataProto, scores: Callable[[], DataProto]
    ) -> Experience:
        """Samples of whole groups, and what waits for their scores, for the training step after `step` others."""


class Pace:
    """Draw, learn, draw, learn: each experience is of the weights that learn from it."""

    overlaps = False

    def __init__(
        self, draws: Draws, loader: PromptDataLoader, run: Run, trained_groups: dict[str, Any] | None = None
    ):
        """`trained_groups`: of later steps, where a resumed run has trained some before all of the earlier ones."""
        self.draws, self.run, self.trained_groups = draws, run, trained_groups
        self.prompts = PromptStream(loader)

    def next(self) -> Experience:
        """The experience of the next training step."""
        return self.draws.start_sampling(self.prompts.take(), self.run.step)()

    def settle(self) -> None:
        """Before others ask the engines: what is being drawn has been drawn."""

    def metrics(self, batch: DataProto) -> dict[str, float]:
        """Of the experience that has just been learned from: where others draw, how old it was."""
        if self.run.config.actor_rollout_ref.hybrid_engine:
            return {}
        return staleness(self.run.step, batch.non_tensor_batch["version"])

    def data_state(self) -> dict[str, Any]:
        """Where in the data a run would go on that has learned from all experiences up to now, and from no other."""
        return self.prompts.state_dict()

    def close(self) -> None:
        """Nothing more is going to be learned: begin to draw nothing more."""


class OneStepOff(Pace):
    """While step k is learned, the samples of step k + 1 are drawn, with the weights from before step k."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.overlaps = self.run.config.trainer.max_staleness != 0
        self.ahead: _Ahead | None = None
        self._before: dict[str, Any] = {}

    def next(self) -> Experience:
        experience = (self.ahead or self._start(self.run.step)).experience
        following = self.run.step + 1
        self.ahead = self._start(following) if self.overlaps and following < self.run.total_steps else None
        return experience

    def _start(self, step: int) -> "_Ahead":
        self._before = self.prompts.state_dict()
        return _Ahead(self.draws.start_sampling(self.prompts.take(), step))

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
