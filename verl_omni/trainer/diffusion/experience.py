"""What `sample` hands to `learn`."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from verl.protocol import DataProto

from verl_omni.agent_loop.outputs import side_by_side
from verl_omni.trainer.progress import timer

_numbers = itertools.count()


def new_experience() -> str:
    """A name that no other experience of this run has."""
    return f"e{next(_numbers)}"


def places(experience: str, samples: int, ship: bool) -> list[dict[str, Any]]:
    """Where the engines are to leave the trajectory of each sample."""
    return [{"key": f"{experience}/{sample}", "ship": ship} for sample in range(samples)]


@dataclass
class Experience:
    """Samples that were drawn for one training step, and where the rest of them is.

    `batch` holds a row a sample: its group, a few numbers, and a reference to its trajectory, under one of `names`.
    `version` is the number of training steps that the weights had seen which drew it; the least one, where several
    versions did. Rewards may still be on their way: `scores` waits for them. Several experiences can be alive at once.
    """

    names: tuple[str, ...]
    version: int
    batch: DataProto
    collect: Callable[[], DataProto]
    metrics: dict[str, float] = field(default_factory=dict)  # of how it was drawn

    @cached_property
    def scores(self) -> DataProto:
        """Rewards, in the rows' order."""
        return self.collect()

    def scored(self, timing: dict[str, float]) -> DataProto:
        """The batch with its rewards; they were computed meanwhile, and this is what is left to wait for."""
        with timer(timing, "reward"):
            batch = side_by_side(self.batch, self.scores)
        timing |= {f"gen_{phase}": seconds for phase, seconds in batch.meta_info.pop("timing").items()}
        batch.batch["sample_level_rewards"] = batch.batch["rm_scores"][:, 0]
        return batch
