"""Sums over the samples of each prompt, wherever they lie: other micro-batches, other ranks.

A loss that weighs a sample by what its whole group does cannot see the group in a micro-batch. What it adds up
(`DiffusionLossFn.group_terms`) is computed of all rows first, without a gradient, and each row gets its group's sum.
"""

from typing import Any

import torch
import torch.distributed as dist

from verl_omni.workers import columns
from verl_omni.workers.engine.protocol import TrainingEngine
from verl_omni.workers.engine.replay import Batch


@torch.no_grad()
def group_sums(engine: TrainingEngine, data: Batch, loss_function: Any) -> torch.Tensor:
    """(B, K, M): of every row's group, at each of its noise levels, the sums of the loss's M terms, in CPU memory.

    Where the weights are still those that drew, the velocities of that time are taken: no forward is needed.
    """
    # Fillers are evaluated too: every rank takes part in every forward.
    rows = columns.near({k: v for k, v in data.items() if k not in ("share", "group_sums")}, engine.device)
    terms = None
    for part in engine.replay.split(rows, engine.micro_batch_size):
        micro_batch = engine.replay.take(rows, part)
        if loss_function.unmoved:
            output = {"velocity": micro_batch["old_velocity"]}
        else:
            engine.begin_micro_batch(False)
            with engine.autocast():
                output = engine.prepare_model_outputs(micro_batch)
        found = loss_function.group_terms(output, micro_batch).double().cpu()
        if terms is None:
            terms = found.new_zeros(*data["sigma"].shape, found.shape[1])
        if part.counts:
            terms[part.rows, part.within] = found
    if "share" in data:
        terms[data["share"] == 0] = 0.0
    group = data["group"]
    sums = terms.new_zeros(_most(engine, int(group.max()) + 1), *terms.shape[1:]).index_add_(0, group, terms)
    if engine.layout.data > 1:
        sums = sums.to(engine.device)
        dist.all_reduce(sums, group=engine.get_data_parallel_group())
    return sums.cpu()[group]


def _most(engine: TrainingEngine, groups: int) -> int:
    if engine.layout.data == 1:
        return groups
    most = torch.tensor(groups, device=engine.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)
