"""Teachers in processes of their own, asked by the trainer. Samples and answers go past it, by reference."""

from typing import Any

import numpy as np
from verl.protocol import DataProto

from verl_omni.workers.rollout.trajectories import COLUMN, parts_of, with_more


def check_rows_apart(rows: DataProto) -> None:
    """Answers travel with samples: a sample that is noised twice has one place for two of them."""
    names = [reference.key for parts in parts_of(rows) for reference in parts]
    if len(set(names)) < len(names):
        raise ValueError(
            "prepare_actor_batch gives a sample in several rows, and of teachers on devices of their own it has one "
            "answer: leave actor_rollout_ref.actor.teacher.n_gpus_per_node out"
        )


class Teachers:
    def __init__(self, workers: Any, training: Any):
        """`workers` hold them; `training` may hold the samples."""
        self.workers, self.training = workers, training

    @property
    def ranks(self) -> int:
        """Each has rows of its own."""
        return self.workers.world_size

    def ask(self, rows: DataProto) -> np.ndarray:
        """Of each row where its sample lies, and where what its teacher says of it."""
        own = rows.non_tensor_batch[COLUMN]
        if any(reference.stored is None for parts in parts_of(rows) for reference in parts):
            lent = self.training.lend(DataProto(non_tensor_batch={COLUMN: own})).non_tensor_batch
            rows = DataProto(rows.batch, lent, rows.meta_info)
        return with_more(own, self.workers.teach(rows).non_tensor_batch[COLUMN])
